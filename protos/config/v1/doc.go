// Package configv1 is the configuration of Tandem: the message of config.proto and what makes it usable, [Load].
//
// Reading is strict and says everything at once: each mistake is named with its path and what would be right. Three
// passes: shape.go holds the YAML against the message (names, kinds), defaults.go fills in what was left out, validate.go
// and pools.go judge the values. What comes out of Load needs no further checks.
//
// A new setting is a field of config.proto with a comment that says unit and default, a default in defaults.go, and a
// check in validate.go. The Go code of the message is generated (scripts/generate.sh) and committed.
package configv1
