package redisstore

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
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
}

// Time limits of commands. Those on a request's path have onPath, and a hand-over, which is read once and up to 8 MiB
// large, has handOverTime; the others run beside requests.
const (
	onPath       = 5 * time.Millisecond
	handOverTime = 50 * time.Millisecond
	besidePath   = 500 * time.Millisecond
)

func (o *Options) setDefaults() {
	if o.KeyPrefix == "" {
		o.KeyPrefix = "tandem"
	}
	if o.Lease == 0 {
		o.Lease = 3 * time.Second
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
func (o *Options) client(c *counters) (redis.UniversalClient, error) {
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
		DialTimeout: besidePath, ReadTimeout: besidePath, WriteTimeout: besidePath, PoolTimeout: besidePath,
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

// dialer connects, with TLS if configured, and counts bytes.
func dialer(encrypted *tls.Config, c *counters) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		d := net.Dialer{Timeout: besidePath, KeepAlive: 30 * time.Second}
		conn, err := d.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		conn = &countedConn{conn, c}
		if encrypted == nil {
			return conn, nil
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
		return tls.Client(conn, own), nil
	}
}
