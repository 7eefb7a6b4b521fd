// Package trace turns recorded work into tasks: it reads four public trace
// formats, derives from each a compact trace of numbers, ships such traces, and
// composes batches of tasks from them.
//
// What a trace contributes is lengths, gaps, prefix structure and rewards. Text
// is counted and left where it is: neither the compact trace nor any task made
// here contains a word of it. What no trace has is composed from published
// quantiles (package workload), and every task's metadata says which of its
// numbers were recorded, derived or composed.
//
// Reading is all or nothing: a malformed, truncated or alien file is one error
// that names file, line or JSON path, and field, and nothing of the import
// remains. Files are decoded as streams; each format's file says what is held
// in memory and what bounds it. docs/traces.md describes formats and derivations.
//
// Non-goals: running anything, arrival processes, and guessing a file's format.
package trace
