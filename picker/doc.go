// Package picker decides which endpoints serve a request. It is pure: no I/O, no clock, no locks, no allocation; what it
// knows is the request and the view it is given, and chance comes in as a number. So every decision can be replayed and
// written down as a transcript (testdata/*.txt).
//
// The algorithm, in three duties:
//
//  1. Filter: role, health, what already failed this request, and the group (endpoints of a group only pair within it).
//  2. Price: what taking an endpoint costs, in tokens (price.go). For P that is what is booked on it and the part of this
//     prompt that it does not hold; for D what is booked on it.
//  3. Pick: the cheapest pair; equals are decided by chance, so that replicas which see the same do not all choose alike.
//
// Price is the seam: a cost model in seconds replaces price.go and nothing else.
package picker
