// Package request reads the bodies of the generating APIs: what they have in common under one name each, what vLLM
// refuses at once, and the prompt that the model would see.
package request
