package redisstore

import (
	"cmp"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"tandem/kvstate/fleetclock"
)

// streamID is the id of a stream's entry: its time by the server's clock, and a count within that millisecond.
type streamID struct{ ms, n uint64 }

func parseStreamID(text string) (id streamID, err error) {
	ms, n, ok := strings.Cut(text, "-")
	if ok {
		id.ms, err = strconv.ParseUint(ms, 10, 64)
		if err == nil {
			id.n, err = strconv.ParseUint(n, 10, 64)
		}
	}
	if !ok || err != nil {
		return streamID{}, fmt.Errorf("%.60q is not the id of a stream's entry", text)
	}
	return id, nil
}

func (id streamID) String() string {
	return strconv.FormatUint(id.ms, 10) + "-" + strconv.FormatUint(id.n, 10)
}

func (id streamID) compare(other streamID) int {
	return cmp.Or(cmp.Compare(id.ms, other.ms), cmp.Compare(id.n, other.n))
}

// clock estimates Redis's clock from our own entries: their ids are the server's time.
type clock struct {
	ahead  atomic.Int64 // microseconds that it is ahead of ours
	fleet  *fleetclock.Clock
	log    *slog.Logger
	warned atomic.Bool // that the host's clock is wrong
}

// set records the id of an entry of ours: it was added between sent and replied. The id has whole milliseconds, so
// half of one is added.
func (c *clock) set(id streamID, sent, replied time.Time) {
	c.ahead.Store(int64(id.ms)*1000 + 500 - (sent.UnixMicro()+replied.UnixMicro())/2)
	if c.fleet == nil {
		return
	}
	half := replied.Sub(sent) / 2
	c.fleet.Set(sent.Add(half), time.UnixMicro(int64(id.ms)*1000+500), half)
	ahead := c.fleet.Ahead()
	if wrong := ahead.Abs() > fleetclock.MaxAhead; wrong != c.warned.Swap(wrong) && wrong {
		c.log.Warn("this host's clock is not Redis's, whose time tickets have: set it", "ahead", ahead)
	}
}

// of returns Redis's clock as the time since 1970.
func (c *clock) of(now time.Time) time.Duration {
	return time.Duration(now.UnixMicro()+c.ahead.Load()) * time.Microsecond
}

// age returns an entry's age, by Redis's clock.
func (c *clock) age(id streamID, now time.Time) time.Duration {
	return max(0, time.Duration(now.UnixMicro()+c.ahead.Load()-int64(id.ms)*1000-500)*time.Microsecond)
}
