package openai

// HasMedia reports whether a chat has parts that encode endpoints process: images, audio, video.
func (r *Request) HasMedia() bool {
	if r.api != Chat {
		return false
	}
	for range r.media() {
		return true
	}
	return false
}

// AppendEncode appends to dst the body for an encode endpoint: one user message with the chat's media, in their order
// and byte for byte, and the members that engines hash together with a part. It has no text and no token limit: such
// an engine generates nothing (vLLM 0.33.0, examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py).
func (r *Request) AppendEncode(dst []byte) []byte {
	dst = append(dst, '{')
	for _, name := range [...]string{"model", "mm_processor_kwargs", "media_io_kwargs", "priority", "session_id"} {
		if value := r.topValue(name); present(value) {
			dst = append(append(append(dst, '"'), name...), `":`...)
			dst = append(append(dst, value...), ',')
		}
	}
	dst = append(dst, `"stream":false,"messages":[{"role":"user","content":[`...)
	first := true
	for part := range r.media() {
		if !first {
			dst = append(dst, ',')
		}
		dst, first = append(dst, part...), false
	}
	return append(dst, `]}]}`...)
}

// media iterates over the parts of a chat's messages that are images, audio or video.
func (r *Request) media() func(yield func(part []byte) bool) {
	return func(yield func([]byte) bool) {
		for message := range elements(r.Raw(FieldMessages)) {
			for key, content := range pairs(message) {
				if string(key) != "content" {
					continue
				}
				for part := range elements(content) {
					if isMedia(part) && !yield(part) {
						return
					}
				}
			}
		}
	}
}

func isMedia(part []byte) bool {
	for key, value := range pairs(part) {
		if string(key) == "type" {
			switch string(value) {
			case `"image_url"`, `"audio_url"`, `"video_url"`, `"input_audio"`:
				return true
			}
			return false
		}
	}
	return false
}
