// Package configv1 is the message of the configuration, generated from config.proto (scripts/generate.sh). Package
// replica/config reads it.
package configv1
