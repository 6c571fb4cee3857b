package replica

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/extproc/core"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
	"tandem/replica/config/diff"
)

// Source is where the configuration of a replica comes from.
type Source struct {
	Name string // for people
	File string // that is watched for changes; "": none is
	// Load reads it. Warnings and errors are those of [config.Load].
	Load func() (c *configv1.Config, warnings []string, err error)
}

// FileSource is a file.
func FileSource(path string) Source {
	return Source{path, path, func() (*configv1.Config, []string, error) { return config.Load(path) }}
}

// Inside is a replica inside an Envoy.
type Inside struct {
	Core    *core.Core
	Admin   http.Handler        // of the operator's port
	Metrics prometheus.Gatherer // all of the replica's

	replica *replica
	stop    context.CancelFunc
	stopped chan struct{}
}

// readyTime is how long a replica that starts may take to know what the others know.
const readyTime = 5 * time.Second

// StartInside starts a replica for the Envoy that has loaded this program. It returns when requests may come.
func StartInside(from Source, set Settings, log *slog.Logger) (*Inside, error) {
	cfg, warnings, err := from.Load()
	for _, w := range warnings {
		log.Warn(w)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from.Name, err)
	}
	if !config.Inside(cfg) {
		return nil, fmt.Errorf("%s: envoy.run is not inside: this configuration is for `tandem serve`", from.Name)
	}
	spans, err := newSpans(cfg.GetTracing(), set.Release, log)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	stop := func() {
		cancel()
		spans.close()
	}
	r, err := newReplica(ctx, from, cfg, set,
		func(Behind) (Front, error) { return loaded{}, nil }, spans.tracer(), log)
	if err != nil {
		stop()
		return nil, err
	}
	l, err := r.listen(ctx)
	if err != nil {
		stop()
		return nil, err
	}
	i := &Inside{r.core, r.admin.Handler, r.all, r, stop, make(chan struct{})}
	var ended error
	go func() {
		defer close(i.stopped)
		if ended = r.run(ctx, l); ended != nil {
			log.Error("the replica inside Envoy has ended", "err", ended)
		}
	}()
	for end := time.Now().Add(readyTime); !r.ready.Load() && time.Now().Before(end); {
		select {
		case <-i.stopped:
			stop()
			return nil, ended
		default:
		}
		time.Sleep(10 * time.Millisecond) //nolint:forbidigo // Envoy's start waits for this, and has nothing else to do
	}
	return i, nil
}

// Ready reports whether requests may come.
func (i *Inside) Ready() bool { return i.replica.ready.Load() }

// Takes reports whether a running replica can put a configuration in force, as [Inside.Reload] does: nothing of it takes
// a restart.
func (i *Inside) Takes(next *configv1.Config) bool {
	r := i.replica.reload
	r.mu.Lock()
	defer r.mu.Unlock()
	return i.replica.fleet.sameDiscovery(next) == nil && len(needRestart(diff.Difference(r.config, next))) == 0
}

// Reload puts the present configuration of the source in force, all of it or nothing.
func (i *Inside) Reload() error {
	_, err := i.replica.reload.reload(context.Background())
	return err
}

// Stop ends the replica, and waits until its ports are free.
func (i *Inside) Stop() {
	i.stop()
	<-i.stopped
}
