package openai

import (
	"bytes"
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
)

// Medium is a kind of content other than text in a prompt.
type Medium uint8

// The kinds of media. Their cost for an engine does not depend on their size in bytes.
const (
	Image Medium = iota
	Audio
	Video
	File // of a format that no other kind has, such as PDF
	NumMedia

	sealed // what engines do not render: encrypted reasoning, signatures
)

// Size is what an estimate of a prompt's tokens is made from.
type Size struct {
	Text    int             // bytes of text, with the JSON around it
	Counted int64           // tokens that are counted by their own rule: token ids, rows of embeddings
	Media   [NumMedia]int32 // by kind
}

// HasMedia reports whether there are media.
func (s *Size) HasMedia() bool { return s.Media != [NumMedia]int32{} }

// Size returns what the tokens of the body's prompt are estimated from. Left out are the bytes of media, of members
// that are long and no part of the prompt (schemas, logit_bias, metadata), and of what no engine renders.
func (r *Request) Size() Size { return r.size }

const (
	// longMember is the number of bytes from which on a member that is no prompt is left out. Shorter ones are in what
	// was learned of bytes and tokens.
	longMember = 512
	// longString is the number of bytes from which on a string may be a medium whatever it begins with.
	longString = 512
	// rowBytes are the bytes of one token in prompt_embeds: base64 of a tensor with hidden_size values of two bytes
	// for each token (vLLM 0.32.0, renderers/embed_utils.py), here with 6,144 of them.
	rowBytes = 16 << 10
)

// measure returns the size of the scanned body.
func (r *Request) measure() Size {
	s := Size{Text: len(r.body) - r.beside.bytes, Media: r.beside.count}
	for i := range r.members[scopeTop] {
		m := &r.members[scopeTop][i]
		long := int(m.valueEnd-m.value) >= longMember
		switch {
		case m.field == FieldPromptEmbeds:
			if raw := r.text(m); present(raw) {
				s.Counted += int64(1 + len(raw)/rowBytes)
				s.Text -= len(raw)
			}
		case r.mayBeIDs(m.field):
			if n := idsIn(r.text(m)); n > 0 {
				s.Counted += n
				s.Text -= int(m.valueEnd - m.value)
			}
		case long && !r.isPrompt(m):
			s.Text -= int(m.valueEnd - m.value)
		}
	}
	s.Text = max(s.Text, 0) // a list of ids that has media, too, is refused
	return s
}

// mayBeIDs reports whether a top-level member may be a prompt of token ids.
func (r *Request) mayBeIDs(f Field) bool {
	switch r.api {
	case Completions:
		return f == FieldPrompt
	case Generate:
		return f == FieldTokenIDs
	case SGLangGenerate:
		return f == FieldInputIDs
	case PassThrough:
		return f == FieldInput || f == FieldPrompt || f == FieldInputIDs
	case Chat, Responses, Messages, Models:
	}
	return false
}

// idsIn returns about how many token ids a list has, or a list of such lists; 0: it has no ids. A long list is judged
// by its beginning.
func idsIn(raw []byte) int64 {
	i := 0
	for i < len(raw) && raw[i] == '[' {
		i = skipSpace(raw, i+1)
	}
	if i == 0 || i >= len(raw) || raw[i]-'0' > 9 {
		return 0
	}
	const enough = 4096
	part := raw[:min(len(raw), enough)]
	n := int64(bytes.Count(part, []byte{','}) + 1)
	if len(part) < len(raw) {
		n = n * int64(len(raw)) / int64(len(part))
	}
	return n
}

// isPrompt reports whether engines render a top-level member into the prompt. Tool definitions are a part of it,
// schemas are not. What other paths make of their members is unknown: there all of them count.
func (r *Request) isPrompt(m *member) bool {
	switch r.api {
	case PassThrough, Models:
		return true
	case Chat, Completions, Responses, Messages, Generate, SGLangGenerate:
	}
	switch m.field {
	case FieldMessages, FieldPrompt, FieldInput, FieldTokenIDs, FieldInputIDs, FieldTools, FieldSystem,
		FieldInstructions, FieldDocuments, FieldChatTemplateKwargs:
		return true
	case FieldText:
		return r.api == SGLangGenerate // of Responses: the format of the answer
	default:
	}
	switch string(r.key(m)) {
	case "suffix", "previous_input_messages": // the latter: vLLM's, of gpt-oss (0.32.0, responses/protocol.py)
		return true
	}
	return besidePrompt(r.key(m)) // whose media are left out already
}

// beside is the part of a body whose bytes are not text.
type beside struct {
	api   API
	top   []byte // the member that is read
	chat  bool   // it is the messages of a chat
	media bool   // it may have media
	found []medium
	count [NumMedia]int32
	bytes int

	cuts     []unrendered // in order
	cutBytes int          // of the messages of a chat, without lines
}

// medium is one string of the body, with its quotes.
type medium struct {
	start, end int32
	kind       Medium
}

// maxMedia bounds the media whose places are kept, for the hashes of a prompt. All are counted.
const maxMedia = 512

func (m *beside) reset() {
	m.top, m.found, m.count, m.bytes = nil, m.found[:0], [NumMedia]int32{}, 0
	m.cuts, m.cutBytes = m.cuts[:0], 0
}

// in returns the finder for a member of a scope; nil: it has nothing to find.
func (m *beside) in(s scope, name []byte) *beside {
	if s != scopeTop {
		return nil
	}
	has := false
	m.chat, m.media = false, true
	switch m.api {
	case Chat, Messages:
		m.chat = string(name) == "messages"
		m.media = m.chat
		has = m.chat || m.api == Messages && string(name) == "system"
	case Responses:
		has = string(name) == "input"
	case Completions, SGLangGenerate:
		has = besidePrompt(name)
	case PassThrough: // embeddings, scores, ranks
		switch string(name) {
		case "messages", "input", "inputs", "images", "documents", "queries", "query", "data_1", "data_2":
			has = true
		default:
			has = besidePrompt(name)
		}
	case Generate, Models:
	}
	if !has {
		return nil
	}
	m.top = name
	return m
}

// besidePrompt reports whether a member has the media of a prompt of text: SGLang's.
func besidePrompt(name []byte) bool {
	switch string(name) {
	case "image_data", "audio_data", "video_data":
		return true
	}
	return false
}

// mayBeMedium reports whether the string at b[start:end] is worth a look: it is long, or begins like a URL or the line
// of Claude Code.
func mayBeMedium(b []byte, start, end int) bool {
	const data, http, file, line = 0x61746164, 0x70747468, 0x656c6966, 0x6e612d78 // as little-endian numbers
	if end-start < 8 {
		return false
	}
	switch binary.LittleEndian.Uint32(b[start+1:]) {
	case data, http, file, line:
		return true
	}
	return end-start >= longString
}

// see looks at a string below the member, and counts it if it is a medium.
func (m *beside) see(b []byte, start, end int, stack *levels, open int) {
	m.line(b, start, end)
	if !m.media || open > keptNames {
		return
	}
	name, parent := m.path(b, stack, open)
	kind := kindOf(m.top, name, parent, b[start+1:end-1])
	if kind == NumMedia {
		return
	}
	m.bytes += end - start
	if kind < NumMedia {
		m.count[kind]++
	}
	if len(m.found) < maxMedia {
		m.found = append(m.found, medium{int32(start), int32(end), kind})
	}
}

// path returns the name of a value, and that of the object or list around it. Values of lists have the list's name.
func (m *beside) path(b []byte, stack *levels, open int) (name, parent []byte) {
	for level := open - 1; level >= 0; level-- {
		if !stack.object(level) {
			continue
		}
		at := int(stack.names[level])
		end, _, _ := skipString(b, at)
		if name != nil {
			return name, b[at+1 : end-1]
		}
		name = b[at+1 : end-1]
	}
	if name == nil {
		return m.top, nil
	}
	return name, m.top
}

// kindOf returns the kind of the string with a name, in an object or list with a name, in a top-level member; NumMedia:
// it is text. The names are those of chats (vLLM 0.32.0, entrypoints/chat_utils.py; SGLang's are the same), of
// Anthropic's sources (entrypoints/anthropic/protocol.py) and of Responses.
func kindOf(top, name, parent, value []byte) Medium {
	data := bytes.HasPrefix(value, []byte("data:"))
	if string(parent) == "input" && string(top) == "messages" {
		return NumMedia // of a tool call: engines render its arguments
	}
	switch string(name) {
	case "url":
		switch string(parent) {
		case "image_url", "source", "image_data", "images":
			return byType(value, Image)
		case "audio_url":
			return byType(value, Audio)
		case "video_url":
			return byType(value, Video)
		}
	case "image_url", "image_data", "image_embeds":
		return byType(value, Image)
	case "audio_url", "audio_data", "audio_embeds":
		return byType(value, Audio)
	case "video_url", "video_data":
		return byType(value, Video)
	case "image", "images":
		if data {
			return byType(value, Image)
		}
	case "data":
		switch {
		case string(parent) == "input_audio":
			return Audio
		case string(parent) == "source":
			return byType(value, Image)
		case string(parent) == "content" && isBase64(value): // of redacted thinking
			return sealed
		}
	case "file_data", "file_url":
		return byType(value, File)
	case "encrypted_content", "thought_signature":
		return sealed
	case "signature":
		if string(parent) == "content" {
			return sealed
		}
	}
	return NumMedia
}

// byType returns the kind of media in a data URI, or at the beginning of a file; otherwise if neither is recognised.
func byType(value []byte, otherwise Medium) Medium {
	kind, isData := bytes.CutPrefix(value, []byte("data:"))
	switch {
	case !isData && bytes.HasPrefix(value, []byte("JVBER")): // %PDF
		return File
	case !isData:
		return otherwise
	case bytes.HasPrefix(kind, []byte("image")):
		return Image
	case bytes.HasPrefix(kind, []byte("audio")):
		return Audio
	case bytes.HasPrefix(kind, []byte("video")):
		return Video
	case bytes.HasPrefix(kind, []byte("application/pdf")), bytes.HasPrefix(kind, []byte("text")):
		return File
	}
	return otherwise
}

// isBase64 judges a string by its beginning.
func isBase64(value []byte) bool {
	for _, c := range value[:min(len(value), 64)] {
		if c-'0' > 9 && c|0x20-'a' > 25 && c != '+' && c != '/' && c != '-' && c != '_' && c != '=' && c != '\\' {
			return false
		}
	}
	return len(value) > 0
}

// blocks is the number of blocks that a medium has in the hashes of a prompt: as many as a text of about the same
// number of tokens. It is fixed, because hashes are the same in all processes.
func (m *medium) blocks() int {
	switch m.kind {
	case Image, File:
		return 8
	case Audio:
		return 6
	case Video:
		return 48
	}
	return 0
}

// hash appends the blocks of a medium, which depend on all of its bytes: two images that begin alike have nothing in
// common. before is the hash of the bytes between the last block and the medium.
func (m *medium) hash(dst []uint64, h, before uint64, b []byte, most int) (_ []uint64, chained uint64) {
	h = chain(h, before)
	h = chain(h, xxhash.Sum64(b[m.start:m.end]))
	for i := range min(m.blocks(), most) {
		h = chain(h, uint64(i))
		dst = append(dst, h)
	}
	return dst, h
}
