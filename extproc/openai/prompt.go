package openai

import (
	"math/bits"

	"github.com/cespare/xxhash/v2"
)

// prompt is the member that holds the prompt's bulk.
func (r *Request) prompt() []byte {
	switch r.api {
	case Chat, Messages:
		return r.Raw(FieldMessages)
	case Completions:
		return r.Raw(FieldPrompt)
	case Responses:
		return r.Raw(FieldInput)
	case Generate:
		return r.Raw(FieldTokenIDs)
	case SGLangGenerate:
		if raw := r.Raw(FieldText); present(raw) {
			return raw
		}
		return r.Raw(FieldInputIDs)
	default:
		return nil
	}
}

// Prompts is how many prompts the body asks about, as a list of strings or of lists of token ids; list is false where
// there is one that is not in such a list.
func (r *Request) Prompts() (n int, list bool) {
	raw := r.prompt()
	if r.api != Completions && r.api != SGLangGenerate || len(raw) == 0 || raw[0] != '[' {
		return 1, false
	}
	if first := raw[skipSpace(raw, 1)]; first != '"' && first != '[' {
		return 1, false
	}
	for range elements(raw) {
		n++
	}
	return n, true
}

// PromptBytes is the length of the prompt as it stands in the body, 0 where there is none.
func (r *Request) PromptBytes() int { return len(r.prompt()) }

// PromptIDs is the prompt where the client gives it as token ids: a JSON array as it stands in the body; else nil.
func (r *Request) PromptIDs() []byte {
	raw := r.prompt()
	if len(raw) == 0 || raw[0] != '[' || r.api != Generate && (r.api != Completions || r.promptList()) {
		return nil
	}
	return raw
}

// PromptIsAll reports whether the prompt's member is all that the engine makes the prompt of: a chat of text alone,
// and nothing that cuts the prompt.
func (r *Request) PromptIsAll() bool {
	for i := range r.members[scopeTop] {
		if m := &r.members[scopeTop][i]; string(r.key(m)) == "truncate_prompt_tokens" && present(r.text(m)) {
			return false
		}
	}
	for message := range elements(r.Raw(FieldMessages)) {
		for key, content := range pairs(message) {
			if string(key) != "content" {
				continue
			}
			for part := range elements(content) {
				if part[0] != '"' && !isText(part) {
					return false
				}
			}
		}
	}
	return true
}

// PromptHash appends the hashes of the prompt's leading blocks to dst: each stands for its block and everything
// before it. Blocks are blockBytes of the prompt member's raw bytes, full ones only, at most maxBlocks of them.
// What a chat template renders in front, or what keeps caches apart (model, tools, system, salt, ...), is in every
// hash.
//
// Two requests share hashes as far as their bytes are the same, which for a conversation that grows is all of its
// earlier turns. The hashes are the same in every process of a release. They are a guess at what the engine's
// prefix cache has, cheap and without a tokenizer: the same text with other white space or escapes is another
// prompt.
func (r *Request) PromptHash(dst []uint64, blockBytes, maxBlocks int) []uint64 {
	h := xxhash.Sum64String(r.model)
	for i, f := range [...]Field{FieldCacheSalt, FieldTools, FieldSystem, FieldInstructions, FieldReasoningEffort,
		FieldChatTemplate, FieldChatTemplateKwargs, FieldDocuments} {
		if raw := r.Raw(f); present(raw) {
			h = chain(h, xxhash.Sum64(raw)+uint64(i))
		}
	}
	b := r.prompt()
	if len(b) == 0 || blockBytes <= 0 {
		return dst
	}
	b = b[:len(b)-1] // the closing bracket or quote: where the next turn goes on
	for ; len(b) >= blockBytes && maxBlocks > 0; maxBlocks-- {
		h = chain(h, xxhash.Sum64(b[:blockBytes]))
		dst = append(dst, h)
		b = b[blockBytes:]
	}
	return dst
}

// chain makes one hash of two, their order mattering.
func chain(h, next uint64) uint64 {
	return bits.RotateLeft64(h, 27)*0x9E3779B185EBCA87 ^ next
}
