package replica

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"tandem/extproc/core"
	"tandem/extproc/kvtransfer"
	"tandem/kvstate/operator"
	"tandem/kvstate/tokenize"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
	"tandem/replica/config/diff"
	"tandem/replica/orders"
	"tandem/status"
)

// reloadEvery is how often the files are looked at. A change counts when the files were the same twice in a row: until
// then they may still be being written.
const reloadEvery = time.Second

// reloader puts changes of the configuration file, and of the ticket keys, in force while the server runs. A file that
// is not valid changes nothing.
type reloader struct {
	from  Source
	fleet *fleet
	core  *core.Core
	front Front
	log   *slog.Logger

	reloads *prometheus.CounterVec // result
	last    prometheus.Gauge

	printed atomic.Bool // the file as it is waits for a new bootstrap of Envoy's

	mu     sync.Mutex
	start  *configv1.Config // at the start
	config *configv1.Config // in force; what takes a restart is as it was at the start
	warned string           // of what takes a restart
	logged []string         // warnings about the files in force
}

func newReloader(
	from Source, cfg *configv1.Config, fleet *fleet, core *core.Core, front Front, r prometheus.Registerer, log *slog.Logger,
) *reloader {
	l := &reloader{
		from: from, start: proto.CloneOf(cfg), config: cfg, fleet: fleet, core: core, front: front, log: log,
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tandem_config_reloads_total",
			Help: "Changes of the configuration or of the ticket keys that were taken up, by result (applied, refused)."}, []string{"result"}),
		last: prometheus.NewGauge(prometheus.GaugeOpts{Name: "tandem_config_applied_timestamp_seconds",
			Help: "Time at which the present configuration was put in force."}),
	}
	r.MustRegister(l.reloads, l.last)
	if fleet.operator != nil {
		fleet.operator.Answer(aboutEnvoys, func([]byte) []byte {
			return strconv.AppendInt(nil, int64(front.Serves()), 10)
		})
	}
	l.reloads.WithLabelValues("applied")
	l.reloads.WithLabelValues("refused")
	l.last.SetToCurrentTime()
	l.logged = warningsOf(from, cfg)
	return l
}

// warningsOf returns the warnings about a configuration and its key file, which a start has logged.
func warningsOf(from Source, cfg *configv1.Config) []string {
	_, warnings, err := from.Load()
	if err != nil {
		return nil
	}
	if keys := cfg.GetTickets().GetKeyFile(); keys != "" {
		_, said, _ := kvtransfer.ReadKeyFile(keys) // the start has read it
		warnings = append(warnings, said...)
	}
	return warnings
}

// run reloads when the files change, or at once when now receives, until ctx ends.
func (r *reloader) run(ctx context.Context, now <-chan os.Signal) {
	tick := time.NewTicker(reloadEvery)
	defer tick.Stop()
	inForce := r.look()
	before := inForce
	asked := time.Now()
	if r.outdated() {
		_, _ = r.reload(ctx)
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-now:
			before, inForce = r.look(), r.look()
			_, _ = r.reload(ctx)
		case <-tick.C:
			seen := r.look()
			again := r.printed.Load() && r.front.Serves() > 0
			if !again && r.printed.Load() && time.Since(asked) >= askEnvoysEvery {
				again, asked = r.envoysElsewhere(ctx), time.Now()
			}
			if seen == before && (seen != inForce || again) {
				inForce = seen
				_, _ = r.reload(ctx)
			}
			before = seen
		}
	}
}

// follow reloads when the files change, or on SIGHUP, until ctx ends. Inside Envoy that signal is Envoy's.
func (r *reloader) follow(ctx context.Context) {
	if config.Inside(r.config) {
		r.run(ctx, nil)
		return
	}
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	r.run(ctx, hangup)
}

// outdated reports whether the file has changed while the server started.
func (r *reloader) outdated() bool {
	next, _, err := r.from.Load()
	r.mu.Lock()
	defer r.mu.Unlock()
	return err == nil && len(diff.Difference(r.config, next)) > 0
}

// stamps distinguish versions of files.
type stamps [2]struct {
	modified time.Time
	size     int64
}

func (r *reloader) look() (s stamps) {
	r.mu.Lock()
	files := [...]string{r.from.File, r.config.GetTickets().GetKeyFile()}
	r.mu.Unlock()
	for i, file := range files {
		if info, err := os.Stat(file); err == nil { // follows links: a ConfigMap changes by one
			s[i].modified, s[i].size = info.ModTime(), info.Size()
		}
	}
	return s
}

// reload reads the files and puts what they say in force, all of it or nothing.
func (r *reloader) reload(ctx context.Context) ([]diff.Change, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	changes, err := r.apply(ctx)
	r.printed.Store(errors.Is(err, errPrinted))
	if err != nil {
		r.reloads.WithLabelValues("refused").Inc()
		r.log.Error("configuration not reloaded, the one in force stays", "file", r.from.Name, "err", err)
		r.fleet.note(func(f *status.File) {
			f.Refused, f.Since, f.Waits = err.Error(), time.Now(), errors.Is(err, errPrinted)
		})
		return nil, err
	}
	r.reloads.WithLabelValues("applied").Inc()
	r.last.SetToCurrentTime()
	r.fleet.note(func(f *status.File) {
		f.Refused, f.Waits, f.Restart = "", false, needRestart(changes)
	})
	return changes, nil
}

func (r *reloader) apply(ctx context.Context) ([]diff.Change, error) {
	next, warnings, err := r.from.Load()
	if err != nil {
		return nil, err
	}
	pools, err := config.PoolSpecs(next)
	if err != nil {
		return nil, err
	}
	live, err := r.fleet.liveSettings(next, r.log)
	if err != nil {
		return nil, err
	}
	if err := r.printedLacks(ctx, next); err != nil {
		return nil, err
	}
	keys := live.Keys // made at the start, or other replicas', who keep them in step: they stay
	if file := r.config.GetTickets().GetKeyFile(); file != "" {
		read, said, err := kvtransfer.ReadKeyFile(file)
		if err != nil {
			return nil, err
		}
		keys, warnings = read, append(warnings, said...)
	}
	for _, w := range warnings {
		if !slices.Contains(r.logged, w) { // one that holds on is logged once
			r.log.Warn(w)
		}
	}
	r.logged = warnings
	inForce := proto.CloneOf(r.config)
	diff.TakeEnvoy(inForce, next)
	if err := r.front.Check(inForce); err != nil {
		return nil, err
	}
	changes := diff.Difference(r.config, next)
	r.say(changes, keys.ID() != live.Keys.ID())
	r.noteEnvoys(next)
	if err := r.front.Publish(inForce); err != nil {
		return nil, err
	}
	// Every pool that a request can find must have a policy: the old ones stay until nobody finds their pools any more.
	both := r.core.Settings()
	both.Keys, both.Pools = live.Keys, maps.Clone(both.Pools)
	maps.Copy(both.Pools, live.Pools)
	live.Keys.Take(keys)
	r.core.Apply(both)
	r.fleet.pools.set(ctx, pools)
	r.core.Apply(live)
	r.fleet.keep(next, live.Pools)
	r.config.Pools, r.config.Envoy = next.GetPools(), inForce.GetEnvoy()
	return changes, nil
}

// noteEnvoys notes what a bootstrap from the start of this server lacks; nothing, if the configuration is again as it
// was.
func (r *reloader) noteEnvoys(next *configv1.Config) {
	var paths []string
	for _, c := range diff.Difference(r.start, next) {
		if c.Envoy {
			paths = append(paths, c.Path)
		}
	}
	if paths = diff.Outermost(paths); r.front.Serves() > 0 {
		paths = nil
	}
	r.fleet.note(func(f *status.File) {
		if !slices.Equal(f.Envoy, paths) {
			f.Envoy, f.Outdated = paths, time.Now()
		}
	})
}

// errPrinted: a change waits for a new bootstrap of Envoy's.
var errPrinted = errors.New("the printed bootstrap of Envoy lacks what the pools need now")

// printedLacks returns an error if Envoy has a printed bootstrap without something that the pools of a configuration
// need: with the change in force their requests would fail. So the change waits: for a restart of Tandem, after Envoy's
// with a new bootstrap, or until an Envoy asks for its configuration over xDS, here or at another replica. Tandem does
// not configure a gateway's Envoy.
func (r *reloader) printedLacks(ctx context.Context, next *configv1.Config) error {
	missing := r.newParts(next)
	if len(missing) == 0 || r.config.GetEnvoyGateway() != nil ||
		r.config.GetExtProc().GetProtocol() == "endpointPicker" || r.front.Serves() > 0 || r.envoysElsewhere(ctx) {
		return nil
	}
	return fmt.Errorf("%w (%s): print it anew (tandem envoy), restart Envoy with it, and then Tandem",
		errPrinted, strings.Join(missing, ", "))
}

// aboutEnvoys is the question how many Envoys have their configuration from a replica.
const aboutEnvoys = "envoys"

// askEnvoysEvery is how often the other replicas are asked whether Envoys have come to them, while a change waits for
// that.
const askEnvoysEvery = 10 * time.Second

// envoysElsewhere reports whether an Envoy has its configuration over xDS from another replica. It asks them for a
// second at most: of one that does not answer, or without Redis, nothing is known, and the change waits.
func (r *reloader) envoysElsewhere(ctx context.Context) bool {
	if r.fleet.operator == nil {
		return false
	}
	got, _ := r.fleet.operator.Ask(ctx, aboutEnvoys, nil)
	return slices.ContainsFunc(got.Of, func(a operator.Answer) bool {
		n, err := strconv.Atoi(string(a.Body))
		return err == nil && n > 0
	})
}

// say logs what changes, and, once, what would need a restart.
func (r *reloader) say(changes []diff.Change, keys bool) {
	var envoys []string
	restart, n := needRestart(changes), 0
	for _, c := range changes {
		if c.Envoy {
			envoys = append(envoys, c.Path)
		}
		if !c.Live {
			continue
		}
		if n++; n <= maxLogged {
			r.log.Info("configuration changed", "path", c.Path,
				"before", orUnset(c.Before), "now", orUnset(c.After))
		}
	}
	if n > maxLogged {
		r.log.Info("configuration changed", "and_more", n-maxLogged)
	}
	if keys {
		r.log.Info("ticket keys changed")
	}
	if n == 0 && !keys && len(restart) == 0 {
		r.log.Info("configuration read again, nothing to change")
	}
	if envoys = diff.Outermost(envoys); len(envoys) > 0 && r.front.Serves() == 0 {
		// No warning: they may get it from another replica.
		r.log.Info("Envoys that do not get their configuration over xDS need a new bootstrap (tandem envoy)", "paths", envoys)
	}
	switch text := fmt.Sprint(restart); {
	case len(restart) == 0:
		r.warned = ""
	case text == r.warned && n == 0 && !keys:
		r.log.Info("configuration read again: what differs still takes a restart of tandem", "paths", restart)
	case text != r.warned:
		r.log.Warn("these changes take a restart of tandem; the former settings stay in force", "paths", restart)
		r.warned = text
	}
}

// needRestart returns the paths of the changes that take a restart.
func needRestart(changes []diff.Change) (paths []string) {
	for _, c := range changes {
		if !c.Live {
			paths = append(paths, c.Path)
		}
	}
	return diff.Outermost(paths)
}

// orUnset is a setting's value for the log.
func orUnset(value string) string { return cmp.Or(value, "not set") }

// maxLogged bounds the lines about one change.
const maxLogged = 100

// newParts returns what next's pools need of Envoy's bootstrap and those at the start did not need.
func (r *reloader) newParts(next *configv1.Config) []string {
	known := r.front.Parts(r.start.GetPools())
	return slices.DeleteFunc(r.front.Parts(next.GetPools()), func(part string) bool { return slices.Contains(known, part) })
}

// coreOptions returns the options from the configuration, with the parts that run already.
func coreOptions(cfg *configv1.Config, f *fleet, log *slog.Logger) (core.Options, error) {
	live, err := f.liveSettings(cfg, log)
	if err != nil {
		return core.Options{}, err
	}
	f.peers.set(cfg, live.Pools)
	o := config.CoreOptions(cfg)
	o.State, o.Log, o.Settings, o.Tokenizer, o.Check = f.state, log, live, tokenize.New(log), f.prober.Check
	o.Models = f.prober
	o.MaxRedirects, o.Operator = config.MaxRedirects, orders.OperatorToken(cfg.GetAdmin().GetTokenFile())
	return o, nil
}
