// Package redisclient connects to a Redis (a single server, Sentinels or a Cluster), counts the traffic, and keeps the
// state of the connection.
package redisclient

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Timeout is the limit for connecting, for each read and write, and for waiting for a connection.
const Timeout = 500 * time.Millisecond

// Options are the connection. redisstore.Options has the fields' meanings.
type Options struct {
	URL            string
	Nodes          []string
	SentinelMaster string
	Cluster        bool
	PasswordFile   string
	TLS            *tls.Config
}

// Counts are the traffic of a client since it was made. Commands include those that open connections; Errors are
// failed and late ones.
type Counts struct {
	Commands, BytesSent, BytesRead, Errors atomic.Int64

	Refusals Refusals
}

// New returns a client, which counts in c. It connects when it is used. It fails if the URL cannot be read.
func New(o Options, c *Counts) (redis.UniversalClient, error) {
	u, err := redis.ParseURL(o.URL)
	if err != nil {
		return nil, fmt.Errorf("reading the URL of Redis: %w", withoutURL(err))
	}
	encrypted := u.TLSConfig
	if encrypted != nil {
		// the URL's names one host, but there may be several nodes
		encrypted = &tls.Config{MinVersion: tls.VersionTLS12}
		if o.TLS != nil {
			encrypted = o.TLS
		}
	}
	options := &redis.UniversalOptions{
		Addrs: append([]string{u.Addr}, o.Nodes...), MasterName: o.SentinelMaster, IsClusterMode: o.Cluster,
		Username: u.Username, Password: u.Password, DB: u.DB, TLSConfig: encrypted, Dialer: dialer(encrypted, c),
		DialTimeout: Timeout, ReadTimeout: Timeout, WriteTimeout: Timeout, PoolTimeout: Timeout,
		ContextTimeoutEnabled: true, MaxRetries: 1, MinRetryBackoff: -1, MaxRetryBackoff: -1, DialerRetries: 1,
		MinIdleConns: 1, PoolSize: 64,
		ConnMaxIdleTime: 5 * time.Minute, DisableIdentity: true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	if o.SentinelMaster != "" {
		options.IsClusterMode = false
	}
	if o.PasswordFile != "" {
		user := u.Username
		options.CredentialsProviderContext = func(context.Context) (string, string, error) {
			text, err := os.ReadFile(o.PasswordFile)
			return user, strings.TrimSpace(string(text)), err
		}
	}
	client := redis.NewUniversalClient(options)
	client.AddHook(counting{c})
	return client, nil
}

// withoutURL removes the URL, and the password in it, from an error.
func withoutURL(err error) error {
	if _, reason, ok := strings.Cut(err.Error(), "\": "); ok {
		return fmt.Errorf("%s", reason) //nolint:err113 // the reason alone
	}
	return err
}

// dialer connects, with TLS if configured, counts bytes, and bounds replies.
func dialer(encrypted *tls.Config, c *Counts) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		d := net.Dialer{Timeout: Timeout, KeepAlive: 30 * time.Second}
		conn, err := d.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		conn = &countedConn{conn, c}
		if encrypted == nil {
			return &boundedConn{Conn: conn}, nil
		}
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			_ = conn.Close()
			return nil, fmt.Errorf("connecting to Redis: %w", err)
		}
		own := encrypted.Clone()
		if own.ServerName == "" {
			own.ServerName = host
		}
		return &boundedConn{Conn: tls.Client(conn, own)}, nil
	}
}

// countedConn counts the bytes of a connection.
type countedConn struct {
	net.Conn
	c *Counts
}

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.c.BytesRead.Add(int64(n))
	return n, err
}

func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.c.BytesSent.Add(int64(n))
	return n, err
}

// counting is the hook that counts commands.
type counting struct{ c *Counts }

func (h counting) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h counting) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.c.Commands.Add(1)
		err := next(ctx, cmd)
		h.failed(cmd, err)
		return err
	}
}

func (h counting) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		h.c.Commands.Add(int64(len(cmds)))
		err := next(ctx, cmds)
		for _, cmd := range cmds { // err is the first of theirs, and "there is none" is one
			h.failed(cmd, cmd.Err())
		}
		return err
	}
}

func (h counting) failed(cmd redis.Cmder, err error) {
	h.c.Refusals.note(cmd.Name(), err)
	if err != nil && !errors.Is(err, redis.Nil) && !errors.Is(err, context.Canceled) {
		h.c.Errors.Add(1)
	}
}
