// Package policy holds the routing policies that the simulator compares: today's
// practice, published schedulers rebuilt in shape, the router core in its
// variants, and an oracle.
//
// Each policy is one small file on top of a shared ledger of what any router
// knows: which turns it sent where and what came back. A policy reads
// nothing else but the events it is told, except for the oracle.
//
// Non-goals: speed on a request path, and faithfulness to another project's code;
// a policy that bears another project's name follows its published rule, stated
// in its file.
package policy
