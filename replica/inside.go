package replica

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"tandem/extproc/core"
	"tandem/replica/config"
)

// Inside is a replica inside an Envoy.
type Inside struct {
	Core    *core.Core
	stop    context.CancelFunc
	stopped chan struct{}
}

// readyTime is how long a replica that starts may take to know what the others know.
const readyTime = 5 * time.Second

// StartInside starts a replica for the Envoy that has loaded this program, with the configuration in file. It returns
// when requests may come.
func StartInside(file string, set Settings, log *slog.Logger) (*Inside, error) {
	cfg, warnings, err := config.Load(file)
	for _, w := range warnings {
		log.Warn(w)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if !config.Inside(cfg) {
		return nil, fmt.Errorf("%s: envoy.run is not inside: this configuration is for `tandem serve`", file)
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
	r, err := newReplica(ctx, file, cfg, set,
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
	i := &Inside{r.core, stop, make(chan struct{})}
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

// Stop ends the replica, and waits until its ports are free.
func (i *Inside) Stop() {
	i.stop()
	<-i.stopped
}
