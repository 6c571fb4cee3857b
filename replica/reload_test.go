package replica

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	envoyconfigs "tandem/envoy-configs"
	"tandem/extproc/core"
	"tandem/extproc/telemetry"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// reloading is a server whose configuration and keys are files, without listeners.
type reloading struct {
	*reloader
	t           *testing.T
	fleet       *fleet
	said        bytes.Buffer
	config, key string
}

// printed is the front of Envoys whose bootstrap was printed.
type printed struct{ loaded }

func (printed) Parts(pools []*configv1.Pool) []string { return envoyconfigs.Parts(pools) }

const twoPools = `
tickets: {keyFile: KEY}
pools:
- {name: a, models: [m], kvTransfer: nixl, endpoints: [{address: "10.0.0.1:1", role: prefill}, {address: "10.0.0.2:1", role: decode}]}
- {name: b, kvTransfer: none, endpoints: [{address: "10.0.0.3:1"}]}
`

func startReloading(t *testing.T) *reloading { return startReloadingWith(t, twoPools) }

func startReloadingWith(t *testing.T, text string) *reloading {
	dir := t.TempDir()
	r := &reloading{t: t, config: filepath.Join(dir, "tandem.yaml"), key: filepath.Join(dir, "key")}
	require.NoError(t, os.WriteFile(r.key, []byte(strings.Repeat("ab", 31)+"01\n"), 0o600))
	r.write(text)
	log := slog.New(slog.NewTextHandler(&r.said, nil))
	cfg, _, err := config.Load(r.config)
	require.NoError(t, err)
	r.fleet, err = newFleet(t.Context(), cfg, Settings{}, log)
	require.NoError(t, err)
	options, err := coreOptions(cfg, r.fleet, log)
	require.NoError(t, err)
	registry := prometheus.NewRegistry()
	made := core.New(options, telemetry.NewMetrics(registry, r.fleet.state))
	r.reloader = newReloader(FileSource(r.config), cfg, r.fleet, made, printed{}, registry, log)
	return r
}

func (r *reloading) write(text string) {
	require.NoError(r.t, os.WriteFile(r.config, []byte(strings.Replace(text, "KEY", r.key, 1)), 0o600))
}

func TestReload(t *testing.T) {
	r := startReloading(t)
	kept := r.fleet.state.Pool("a").Endpoint("10.0.0.1:1")

	r.write(strings.NewReplacer("name: b", "name: c", `"10.0.0.2:1", role: decode`, `"10.0.0.2:1", role: decode, weight: 0`).Replace(twoPools))
	changes, err := r.reload(t.Context())
	require.NoError(t, err)
	require.Len(t, changes, 3)
	require.Same(t, kept, r.fleet.state.Pool("a").Endpoint("10.0.0.1:1"), "what is known of an endpoint stays")
	require.True(t, r.fleet.state.Pool("a").Endpoint("10.0.0.2:1").Paused())
	require.Nil(t, r.fleet.state.Pool("b"))
	require.NotNil(t, r.fleet.state.Pool("c"))
	require.Contains(t, r.core.Settings().Pools, "c")
	require.NotContains(t, r.core.Settings().Pools, "b", "once nobody can find the pool")

	before := r.core.Settings().Keys.ID()
	r.write(strings.Replace(twoPools, "kvTransfer: nixl", "kvTransfer: nixle", 1))
	_, err = r.reload(t.Context())
	require.ErrorContains(t, err, "pools[0].kvTransfer")
	require.Equal(t, before, r.core.Settings().Keys.ID())
	require.NotNil(t, r.fleet.state.Pool("c"), "what is not valid changes nothing")
	require.Contains(t, r.fleet.config.Load().Refused, "pools[0].kvTransfer", "operators see it")

	require.NoError(t, os.WriteFile(r.key, []byte("no key\n"), 0o600))
	r.write(twoPools)
	_, err = r.reload(t.Context())
	require.ErrorContains(t, err, "line 1 is not a key")
	require.NotNil(t, r.fleet.state.Pool("c"), "nor does a key file that is not")

	require.NoError(t, os.WriteFile(r.key, []byte(strings.Repeat("cd", 31)+"02\n"), 0o600))
	r.write("admin: {listen: 127.0.0.1:9191}\n" + twoPools)
	_, err = r.reload(t.Context())
	require.NoError(t, err)
	require.NotEqual(t, before, r.core.Settings().Keys.ID())
	require.Contains(t, r.said.String(), "paths=[admin.listen]")
	require.Empty(t, r.fleet.config.Load().Refused)
	require.Equal(t, []string{"admin.listen"}, r.fleet.config.Load().Restart)
	n := strings.Count(r.said.String(), "take a restart")
	_, err = r.reload(t.Context())
	require.NoError(t, err)
	require.Equal(t, n, strings.Count(r.said.String(), "take a restart"), "said once")
}

// A warning that holds on is logged once: not again with a reload, but when it comes back.
func TestWarningsComeOnce(t *testing.T) {
	r := startReloading(t)
	warned := func() int {
		_, err := r.reload(t.Context())
		require.NoError(t, err)
		return strings.Count(r.said.String(), "others than its owner may read it")
	}
	require.Zero(t, warned())
	require.NoError(t, os.Chmod(r.key, 0o644))
	require.Equal(t, 1, warned())
	require.Equal(t, 1, warned())
	require.NoError(t, os.Chmod(r.key, 0o600))
	require.Equal(t, 1, warned())
	require.NoError(t, os.Chmod(r.key, 0o644))
	require.Equal(t, 2, warned())
	require.Len(t, warningsOf(FileSource(r.config), r.reloader.config), 1, "those of the start are not logged again")
}

// A change is taken up by itself, one on the heels of the start too, and on a signal.
func TestReloadWhenFilesChange(t *testing.T) {
	r := startReloading(t)
	ctx, stop := context.WithCancel(t.Context())
	now, done := make(chan os.Signal, 1), make(chan struct{})
	go func() { r.run(ctx, now); close(done) }()
	defer func() { stop(); <-done }()

	r.write(strings.Replace(twoPools, "name: b", "name: c", 1))
	require.Eventually(t, func() bool { return r.fleet.state.Pool("c") != nil }, 30*time.Second, 10*time.Millisecond)
	r.write(strings.Replace(twoPools, "name: b", "name: dd", 1))
	require.Eventually(t, func() bool { return r.fleet.state.Pool("dd") != nil }, 30*time.Second, 10*time.Millisecond)
	r.write(twoPools)
	now <- os.Interrupt
	require.Eventually(t, func() bool { return r.fleet.state.Pool("b") != nil }, 30*time.Second, 5*time.Millisecond)
}

// A bootstrap does not name pools. A change that needs more than the printed one has waits, and says what is missing;
// what it said is over when the file is as before. The bootstrap is that of the start, whatever came since.
func TestReloadWaitsForTheBootstrap(t *testing.T) {
	r := startReloading(t)
	for _, c := range []struct{ pools, lacks string }{
		{strings.Replace(twoPools, "name: b", "name: c", 1), ""},
		{strings.Replace(twoPools, `"10.0.0.3:1"`, `"10.0.0.3:1", scheme: h2c`, 1), "clusters for h2c"},
		{strings.Replace(twoPools, "kvTransfer: nixl, ", "kvTransfer: sglang, ", 1), "listener decode-leg, listener prefill-mirror, listener answer-leg"},
		{twoPools, ""},
		{strings.Replace(twoPools, "kvTransfer: nixl, ", "kvTransfer: nixl, cachedTokens: prefill, ", 1), "listener answer-leg"},
		{twoPools, ""},
	} {
		r.write(c.pools)
		_, err := r.reload(t.Context())
		file := r.fleet.config.Load()
		if c.lacks == "" {
			require.NoError(t, err)
			require.Empty(t, file.Refused)
			continue
		}
		require.ErrorContains(t, err, "("+c.lacks+")")
		require.Contains(t, file.Refused, c.lacks)
		require.NotContains(t, r.core.Settings().Pools["a"].Dialect.Name, "sglang", "the one in force stays")
	}
}

// An Envoy that has Tandem loaded needs no listeners for legs.
func TestReloadWaitsForTheBootstrapInside(t *testing.T) {
	r := startReloading(t)
	r.front = loaded{}
	r.write(strings.Replace(twoPools, "kvTransfer: nixl, ", "kvTransfer: sglang, ", 1))
	_, err := r.reload(t.Context())
	require.NoError(t, err)
	r.write(strings.Replace(twoPools, `"10.0.0.3:1"`, `"10.0.0.3:1", scheme: h2c`, 1))
	_, err = r.reload(t.Context())
	require.ErrorContains(t, err, "(clusters for h2c)")
}

// With Redis a change waits likewise, unless another replica says that an Envoy has its configuration from it. While Redis
// does not answer nobody says so.
func TestReloadAsksOthersForEnvoys(t *testing.T) {
	mine, other, with, redis := startSharing(t)
	var envoys atomic.Int64
	other.fleet.operator.Answer(aboutEnvoys, func([]byte) []byte { return strconv.AppendInt(nil, envoys.Load(), 10) })
	share(t, mine, other)

	mine.write(strings.Replace(with, "kvTransfer: nixl, ", "kvTransfer: nixl, cachedTokens: prefill, ", 1))
	_, err := mine.reload(t.Context())
	require.ErrorContains(t, err, "(listener answer-leg)")
	require.True(t, mine.fleet.config.Load().Waits)
	redis.Kill()
	_, err = mine.reload(t.Context())
	require.ErrorContains(t, err, "(listener answer-leg)")
	redis.Start()
	envoys.Store(1)
	require.Eventually(t, func() bool { // run asks again from time to time
		_, err = mine.reload(t.Context())
		return err == nil
	}, time.Minute, 100*time.Millisecond, "%v", err)
	require.False(t, mine.fleet.config.Load().Waits)
	require.Empty(t, mine.fleet.config.Load().Refused)
}

// What a pool's dialect has learned of its engines stays while the dialect does.
func TestReloadKeepsPeers(t *testing.T) {
	r := startReloading(t)
	mooncake := strings.Replace(twoPools, "kvTransfer: nixl, ", "kvTransfer: mooncake, ", 1)
	r.write(mooncake)
	start, _, err := config.Load(r.config)
	require.NoError(t, err)
	r.start = start // of which Envoy's bootstrap was printed
	_, err = r.reload(t.Context())
	require.NoError(t, err)
	peers := r.core.Settings().Pools["a"].Peers
	require.NotNil(t, peers)

	r.write(strings.Replace(mooncake, "name: b", "name: c", 1))
	_, err = r.reload(t.Context())
	require.NoError(t, err)
	require.Same(t, peers, r.core.Settings().Pools["a"].Peers)

	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { r.fleet.peers.run(ctx) })
	r.write(twoPools)
	_, err = r.reload(t.Context())
	require.NoError(t, err)
	require.Nil(t, r.core.Settings().Pools["a"].Peers)
	stop()
	running.Wait()
}

// A listener that was not opened at the start is not opened later.
func TestReloadRefusesNotices(t *testing.T) {
	r := startReloading(t)
	r.write(strings.Replace(twoPools, "kvTransfer: nixl, ", "kvTransfer: lmcache, ", 1))
	_, err := r.reload(t.Context())
	require.ErrorContains(t, err, "takes a restart")
}
