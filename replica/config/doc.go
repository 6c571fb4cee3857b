// Package config reads the configuration file: [Load] reads and validates it, and compile.go and its neighbours turn
// it into the settings of the packages that run.
//
// Validation is strict and reports everything at once: each mistake with its path and the remedy. It has three passes:
// shape.go checks the YAML against the message (names, kinds), defaults.go fills in missing settings, validate.go and
// the files by section check the values. A configuration from Load needs no further checks.
//
// A new setting is a field of protos/config/v1/config.proto with a comment that has unit and default, a default in
// defaults.go, a check in the file of its section, and its run-time value in compile.go.
package config
