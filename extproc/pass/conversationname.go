package pass

import (
	"bytes"

	"github.com/cespare/xxhash/v2"

	"tandem/extproc/openai"
)

// Many clients name their conversations. A name shows which of a client's conversations was rewritten, for example
// compacted: its prompt then continues none that engines hold, and what they hold of the old version is of no use.
// Names are used for nothing else: prompts decide (package residency). The hash of a name includes the client's key and
// its tenant's header, so that no client can name the conversation of another one.

// conversationHeaders returns headers with the name of a conversation, and after some what tells apart those that
// share it: of Claude Code (code.claude.com, LLM gateway protocol) with its subagents, Dynamo 1.6
// (docs/agents/session-ids.md), Codex, OpenCode, llm-d's router, Amp, smg 1.13 and vLLM (RFC 48501). The first that
// a request has counts.
func conversationHeaders() [][2]string {
	return [][2]string{
		{"x-claude-code-session-id", "x-claude-code-agent-id"}, {"x-dynamo-session-id", ""},
		{"session-id", "thread-id"}, {"session_id", ""}, {"x-session-id", ""}, {"x-session-affinity", ""},
		{"x-amp-thread-id", ""}, {"x-session-token", ""}, {"x-smg-routing-key", ""}, {"x-routing-key", ""},
	}
}

// conversationMembers returns string members of bodies with such a name.
func conversationMembers() [3]string {
	return [...]string{"prompt_cache_key", "session_id", "conversation"}
}

// headerAPIKey is where clients of Anthropic's API have their key.
const headerAPIKey = "x-api-key"

// lenientHeaders returns the headers that are read for names. If one comes twice, its first value counts.
func lenientHeaders() (out []string) {
	for _, names := range conversationHeaders() {
		for _, name := range names {
			if name != "" {
				out = append(out, name)
			}
		}
	}
	return append(out, headerAPIKey)
}

// longestName bounds a name in bytes: what is longer is none.
const longestName = 512

// conversationName returns the hash of what the client calls its conversation; 0: nothing.
func (x *Pass) conversationName() uint64 {
	kind, name, more := x.nameOf()
	if len(name) == 0 || len(name)+len(more) > longestName {
		return 0
	}
	var d xxhash.Digest
	d.ResetWithSeed(uint64(kind))
	for _, part := range [...][]byte{
		name, more, x.Head.Authorization, x.Head.extra(headerAPIKey), x.Head.extra(x.shared.tenantHeader()),
	} {
		_, _ = d.Write(part)
		_, _ = d.Write([]byte{0}) // no header has it
	}
	return d.Sum64() | 1
}

// nameOf returns where a conversation's name was found, and its parts.
func (x *Pass) nameOf() (kind int, name, more []byte) {
	for i, names := range conversationHeaders() {
		if name = x.Head.extra(names[0]); len(name) == 0 {
			continue
		}
		if names[1] != "" {
			more = x.Head.extra(names[1])
		}
		return i, name, more
	}
	for i, member := range conversationMembers() {
		if name = x.Req.Client.Text(member); len(name) > 0 {
			return 'm' + i, name, nil
		}
	}
	return 'u', userSession(openai.Value(&x.Req.Client, "metadata")), nil
}

// userSession returns the part of metadata.user_id that names a session, as Claude Code writes it: an object in a
// string, with session_id, or user_..._session_ and an id.
func userSession(metadata []byte) []byte {
	_, id, _ := bytes.Cut(metadata, []byte(`"user_id"`))
	for _, before := range []string{`session_id\":\"`, `session_id\": \"`, `_session_`} {
		if _, rest, found := bytes.Cut(id, []byte(before)); found {
			if end := bytes.IndexAny(rest, `"\`); end > 0 {
				return rest[:end]
			}
		}
	}
	return nil
}

// tenantHeader returns the header that names a request's tenant; "": none does.
func (s *Shared) tenantHeader() string {
	if o := s.Observer; o != nil && o.Metrics != nil {
		return o.Usage.Header()
	}
	return ""
}
