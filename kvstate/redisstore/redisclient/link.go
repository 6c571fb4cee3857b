package redisclient

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Link is the state of the connection to Redis.
type Link struct {
	mu     sync.Mutex
	up     bool
	since  time.Time
	reason error
	reply  bool      // Redis gave the reason, in place of what was asked
	until  time.Time // requests do not ask before that
	misses int       // in a row, of requests' questions
}

// NewLink returns a link that is down.
func NewLink() *Link { return &Link{since: time.Now()} }

// Result records the result of a command outside of requests, and reports whether the link went up or down, or is down
// for another reason.
func (l *Link) Result(err error) (changed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if changed = l.up != (err == nil); changed {
		l.up, l.since = err == nil, time.Now()
	}
	var reply redis.Error
	is := errors.As(err, &reply)
	changed = changed || err != nil && is != l.reply
	l.reason, l.reply = err, is
	return changed
}

// IsUp reports whether the link is up, and has been for some time.
func (l *Link) IsUp(least time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.up && time.Since(l.since) >= least
}

// Misses is how many requests in a row may wait in vain for Redis. After that nothing asks Redis for the time Pause.
const (
	Misses = 3
	Pause  = 250 * time.Millisecond
)

// MayAsk reports whether a request may ask Redis now.
func (l *Link) MayAsk() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.up && !time.Now().Before(l.until)
}

// Asked records the result of a request's question.
func (l *Link) Asked(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		l.misses = 0
	} else if l.misses++; l.misses >= Misses {
		l.misses, l.until = 0, time.Now().Add(Pause)
	}
}

// Status describes the link in a line, with the number of replicas that share the Redis; up is whether Redis answers.
func (l *Link) Status(replicas int) (text string, up bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.up {
		text = fmt.Sprintf("redis: up for %v, %d replicas", time.Since(l.since).Round(time.Second), replicas)
		return strings.Replace(text, " 1 replicas", " 1 replica", 1), true
	}
	return fmt.Sprintf("redis: not in use since %s (%v): this replica goes on with what it knows itself",
		l.since.UTC().Format("15:04:05 UTC"), l.reason), false
}
