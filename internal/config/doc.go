// Package config makes the configuration file usable: [Load] reads and validates it, and what it says is compiled into the settings of
// the packages that run.
//
// Reading is strict and says everything at once: each mistake is named with its path and what would be right. Three
// passes: shape.go holds the YAML against the message (names, kinds), defaults.go fills in what was left out, validate.go
// and the files by section judge the values. What comes out of Load needs no further checks.
//
// A new setting is a field of protos/config/v1/config.proto with a comment that says unit and default, a default in defaults.go, a
// check in the file of its section, and its run-time value in compile.go.
package config
