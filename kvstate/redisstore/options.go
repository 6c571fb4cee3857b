package redisstore

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"time"

	"github.com/redis/go-redis/v9"

	"tandem/kvstate/redisstore/redisclient"
)

// Options are the connection to Redis and its use. Zero values take the named defaults.
type Options struct {
	// redis://[user:password@]host:port/db, or rediss:// for TLS; any node of a Sentinel set-up or a Cluster
	URL            string
	Nodes          []string    // more nodes, host:port
	SentinelMaster string      // the nodes are Sentinels, and this is the name of their master
	Cluster        bool        // the nodes are a Cluster's; several nodes without SentinelMaster are taken for one
	PasswordFile   string      // in place of the URL's password; read for every new connection
	TLS            *tls.Config // of rediss://; nil: the system's authorities

	KeyPrefix string        // of all keys, so that several installations share one Redis; default "tandem"
	Lease     time.Duration // time for which a replica's reservations outlive it; default 3 s
	Log       *slog.Logger

	Name    string // of this replica, for people
	Release string // its version of Tandem; default "unknown"
}

// Time limits of commands. Those on a request's path have onPath, and a hand-over, which is read once and up to 8 MiB
// large, has handOverTime. All others have commandTime, and so has a request that is patient (Store.Consume).
const (
	onPath       = 5 * time.Millisecond
	handOverTime = 50 * time.Millisecond
	commandTime  = redisclient.Timeout
)

func (o *Options) setDefaults() {
	if o.KeyPrefix == "" {
		o.KeyPrefix = "tandem"
	}
	if o.Lease == 0 {
		o.Lease = 3 * time.Second
	}
	if o.Release == "" {
		o.Release = "unknown"
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}

// LogTo sends the messages of the Redis client, which has one logger for the whole process, to log. main calls it
// once.
func LogTo(log *slog.Logger) { redis.SetLogger(clientLog{log}) }

type clientLog struct{ log *slog.Logger }

func (l clientLog) Printf(_ context.Context, format string, v ...any) {
	l.log.Debug(fmt.Sprintf(format, v...))
}

// client returns the client. It connects when it is used.
func (o *Options) client(c *redisclient.Counts) (redis.UniversalClient, error) {
	return redisclient.New(redisclient.Options{URL: o.URL, Nodes: o.Nodes, SentinelMaster: o.SentinelMaster,
		Cluster: o.Cluster, PasswordFile: o.PasswordFile, TLS: o.TLS}, c)
}
