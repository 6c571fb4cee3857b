// Package request reads the bodies of the generating APIs: their common members under one name each, the errors that
// vLLM finds at once, and the prompt that the model would see.
package request
