// Package openai reads and edits the bodies of OpenAI-style requests without modelling them.
//
// A body is scanned once ([Request.Scan]): the whole of it is validated as JSON, and where the few top-level members lie
// that somebody needs is noted. Changes are planned as byte ranges ([Patch], [Edits]), so everything else (unknown
// fields, key order, white space, numbers beyond float64, escapes) passes through as it came, and every change can be
// undone exactly ([Edits.Inverse]).
//
// The package knows five APIs ([API]), their members ([Field]), what of a request must not be split over two engines
// ([Request.Unsplittable]), what a client has no business to send ([Request.HasControl]), and OpenAI's error shape
// ([Error]). It knows nothing of Envoy, of endpoints, or of any KV transfer dialect.
package openai
