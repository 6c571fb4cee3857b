// Package configv1 is the configuration of Tandem: the message of config.proto and what makes it usable, [Load].
//
// Reading is strict and says everything at once: each mistake is named with its path and what would be right. Three
// passes: shape.go holds the YAML against the message, defaults.go fills in what was left out, validate.go judges the
// values. What comes out of Load needs no further checks.
package configv1
