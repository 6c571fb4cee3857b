//go:build race

package kvevents

// The race detector allocates by itself, so budgets of allocations mean nothing under it.
const raceDetector = true
