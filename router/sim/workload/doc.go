// Package workload composes sessions of the three default classes from
// published quantiles, as numbers only: lengths in tokens and gaps in seconds.
//
// It exists because no public trace holds RLVR answers of 47,000 tokens, RLHF,
// or the three classes mixed; what is drawn here is composed and every user of
// it must say so. The quantiles are those of Table 2 in "Scheduling Mixed RL
// Rollouts Beyond Prefix Locality" (arXiv 2608.11152), measured there under a
// context limit of 131,072 tokens; docs/traces.md shows the fit.
//
// It is a leaf without state: all randomness comes from the source that the
// caller passes in, and drift is a function of a sample's number, never of time,
// so that two policies compared on one seed see the same work.
//
// Non-goals: arrival times, text, and the mixture of classes, which is the
// trainer's to decide.
package workload
