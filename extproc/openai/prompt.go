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
	default:
		return nil
	}
}

// PromptBytes is the length of the prompt as it stands in the body.
func (r *Request) PromptBytes() int { return len(r.prompt()) }

// PromptHash appends the chained hashes of the prompt's blocks to dst: a hash stands for its block and everything before
// it. Blocks are blockBytes of the member's raw bytes, full ones only, at most maxBlocks; what a chat template renders in
// front or that keeps prompts apart (model, tools, system, salt, ...) is in the seed. Two requests share hashes as far as
// their bytes are the same, which for a conversation that grows is all of its earlier turns.
func (r *Request) PromptHash(dst []uint64, blockBytes, maxBlocks int) []uint64 {
	h := xxhash.Sum64String(r.model)
	for _, f := range [...]Field{FieldCacheSalt, FieldTools, FieldSystem, FieldInstructions, FieldChatTemplate,
		FieldChatTemplateKwargs, FieldDocuments} {
		if raw := r.Raw(f); raw != nil {
			h = chain(h, xxhash.Sum64(raw)+uint64(f))
		}
	}
	b := r.prompt()
	if len(b) > 0 {
		b = b[:len(b)-1] // the closing bracket or quote is not shared with the next turn
	}
	for len(b) >= blockBytes && len(dst) < maxBlocks {
		h = chain(h, xxhash.Sum64(b[:blockBytes]))
		dst = append(dst, h)
		b = b[blockBytes:]
	}
	return dst
}

func chain(h, block uint64) uint64 {
	return bits.RotateLeft64(h, 27)*0x9E3779B185EBCA87 ^ block
}
