// Package jsontext reads JSON byte by byte: a scanner that refuses what Python's json refuses and keeps every member's
// raw text, walkers over raw values, and writers in the order and with the blanks of the real engines.
package jsontext
