package redisclient

import (
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Refusals are the commands that Redis refused lately although it answers: for missing rights or memory, or because it
// takes no writes. What a refused command was for does not work, and everything else does, so nothing else shows it.
// The zero value is ready.
type Refusals struct {
	Said func(command, reason string) // called for a command that was not refused lately; may be nil

	mu        sync.Mutex
	byCommand map[string]refusal // this program has some twenty commands
}

type refusal struct {
	reason string
	at     time.Time
}

// refusedFor is the time for which a command counts as refused. Every repeated command is sent at least once a minute.
const refusedFor = 2 * time.Minute

// refused returns Redis's words if an error is a refusal; "" if not. Its words name no key and no value.
func refused(err error) string {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return ""
	}
	text := reply.Error()
	switch kind, _, _ := strings.Cut(text, " "); kind {
	case "NOPERM", "NOAUTH", "WRONGPASS", "OOM", "READONLY", "MISCONF", "WRONGTYPE", "NOREPLICAS":
		return text
	default:
		if strings.HasPrefix(text, "ERR unknown command") {
			return "ERR unknown command"
		}
		return ""
	}
}

// note records how a command ended.
func (r *Refusals) note(command string, err error) {
	reason := refused(err)
	if reason == "" {
		return
	}
	now := time.Now()
	r.mu.Lock()
	before, known := r.byCommand[command]
	if r.byCommand == nil {
		r.byCommand = map[string]refusal{}
	}
	r.byCommand[command] = refusal{reason, now}
	r.mu.Unlock()
	if r.Said != nil && (!known || now.Sub(before.at) >= refusedFor) {
		r.Said(command, reason)
	}
}

// Latest describes the latest refusal, "" if there was none lately.
func (r *Refusals) Latest() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var latest refusal
	name := ""
	for command, one := range r.byCommand {
		switch {
		case time.Since(one.at) >= refusedFor:
			delete(r.byCommand, command)
		case one.at.After(latest.at):
			name, latest = command, one
		}
	}
	if name == "" {
		return ""
	}
	return strings.ToUpper(name) + ": " + latest.reason
}
