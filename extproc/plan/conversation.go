package plan

import (
	"crypto/sha256"
	"encoding/binary"

	"tandem/extproc/openai"
)

// Conversation returns the name under which the request's turns are stored, and whether the client itself asked for
// token ids. It is zero if the turns are not stored. Model and salt are part of the name, because they are part of
// what KV is: the same tokens under another adapter have other blocks, and another salt belongs to another tenant.
// Token ids do not identify media, so a chat with media has no conversation.
func Conversation(r *Request, p *Policy) (name [16]byte, ownIDs bool) {
	turns := p.Dialect.Turns
	if turns == nil || r.Session == 0 || p.Handoff != HandoffEnvoy ||
		!turns.Takes(r.Client.API(), r.Client.PromptIDs() != nil) || !r.Client.PromptIsAll() {
		return name, false
	}
	ownIDs = r.Client.True(openai.FieldReturnTokenIDs)
	if r.Client.Has(openai.FieldReturnTokenIDs) && !ownIDs { // a duplicate would be an error
		return name, false
	}
	h := sha256.New()
	text := func(b []byte) {
		_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(b))))
		_, _ = h.Write(b)
	}
	text([]byte("turn"))
	text([]byte(r.Pool.Spec.Name))
	text(binary.LittleEndian.AppendUint64(nil, r.Session))
	text([]byte(r.Client.Model()))
	text(r.Client.Raw(openai.FieldCacheSalt))
	return [16]byte(h.Sum(nil)), ownIDs
}
