// Command enginesim stands in for vLLM.
package main
