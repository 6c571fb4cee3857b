// Package roles decides which of a pool's engines compute prompts and which write answers, for engines that may do
// both. It is pure: from the state of a fleet ([Of]) to how many engines of each kind it wants ([Fleet.Want]), and to
// the few words that change now, with the reason ([Fleet.Changes]). It keeps nothing between two calls, so replicas
// with the same view of a fleet choose the same roles. docs/decision.md derives the rule.
//
// Arrows: it imports picker for the cost model and the promise, and kvstate for the view.
package roles
