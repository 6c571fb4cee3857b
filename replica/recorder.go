package replica

import (
	"cmp"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"tandem/extproc/core"
	"tandem/extproc/recorder"
	"tandem/kvstate"
	"tandem/picker"
	configv1 "tandem/protos/config/v1"
	"tandem/recording"
	"tandem/replica/config"
	"tandem/replica/orders"
	"tandem/status/words"
)

// recordingOptions returns how a recording is made.
func recordingOptions(r *configv1.Record) recorder.Options {
	if r == nil { // then only an order begins one
		r = config.RecordDefaults()
	}
	return recorder.Options{
		Folder:   cmp.Or(r.GetFolder(), filepath.Join(os.TempDir(), "tandem-recordings")),
		MaxBytes: r.GetMaxBytes(), For: config.Duration(r.GetFor()), Sample: int(r.GetSample()), SaltFile: r.GetSaltFile(),
	}
}

// newRecorder returns the recorder of requests. made returns the core, once requests come.
func newRecorder(
	cfg *configv1.Config, set Settings, state *kvstate.State, made func() *core.Core, r prometheus.Registerer,
	log *slog.Logger,
) *recorder.Recorder {
	lines := promauto.With(r).NewCounterVec(prometheus.CounterOpts{Name: "tandem_recording_lines_total",
		Help: "Requests of a recording by result (written, dropped: too many waited, failed: the file cannot be written).",
	}, []string{"result"})
	for _, result := range []string{recorder.Written, recorder.Dropped, recorder.Failed} {
		lines.WithLabelValues(result)
	}
	out := recorder.New(recorder.Wiring{
		Log: log, Release: set.Release, Replica: replicaName(cfg), Usage: cfg.GetUsage() != nil,
		Fleet: func() recording.Fleet { return knownFleet(state, made(), time.Now()) },
		Lines: func(result string, n int) { lines.WithLabelValues(result).Add(float64(n)) },
	})
	promauto.With(r).NewGaugeFunc(prometheus.GaugeOpts{Name: "tandem_recording",
		Help: "1 while requests are recorded."}, func() float64 {
		if out.On() {
			return 1
		}
		return 0
	})
	return out
}

// beginRecording begins the recording of the configuration. A salt that cannot be read is an error.
func (r *replica) beginRecording() error {
	c := r.cfg.GetRecord()
	if c == nil || c.GetOnOrder() {
		return nil
	}
	return r.core.Recorder.Start(recordingOptions(c))
}

// recordOrders are the orders about recordings. They apply to this replica: each records what it serves.
//
//	GET    /api/recording
//	POST   /api/recording?for=1h&sample=10
//	DELETE /api/recording
func (r *replica) recordOrders(mux *http.ServeMux, allowed func(http.HandlerFunc) http.HandlerFunc) {
	to := r.core.Recorder
	mux.HandleFunc("GET /api/recording", func(w http.ResponseWriter, _ *http.Request) { words.WriteJSON(w, to.Status()) })
	mux.HandleFunc("POST /api/recording", allowed(func(w http.ResponseWriter, q *http.Request) {
		o := recordingOptions(r.cfg.GetRecord())
		err := orders.ReadRecording(q.URL.Query(), &o.For, &o.Sample)
		status := http.StatusBadRequest
		if err == nil {
			err, status = to.Start(o), http.StatusInternalServerError
		}
		if errors.Is(err, recorder.ErrOn) {
			status = http.StatusConflict
		}
		if err != nil {
			r.log.Warn("order refused", "method", q.Method, "path", q.URL.Path, "from", q.RemoteAddr, "err", err)
			orders.AnswerError(w, status, err.Error())
			return
		}
		words.WriteJSON(w, to.Status())
	}))
	mux.HandleFunc("DELETE /api/recording", allowed(func(w http.ResponseWriter, q *http.Request) {
		over := to.Stop()
		if over == nil {
			orders.AnswerError(w, http.StatusConflict, "no recording is in progress")
			return
		}
		r.log.Info("order", "method", q.Method, "path", q.URL.Path, "from", q.RemoteAddr)
		select {
		case <-over:
		case <-time.After(lastLines):
		}
		words.WriteJSON(w, to.Status())
	}))
}

// lastLines is how long an order waits until the last lines are in the file.
const lastLines = 2 * time.Second

// knownFleet returns the pools and their engines as a recording has them.
func knownFleet(state *kvstate.State, c *core.Core, now time.Time) recording.Fleet {
	out := recording.Fleet{At: float64(now.UnixMicro()) / 1e6}
	var v kvstate.View
	for _, p := range state.Pools() {
		policy, _ := c.Passes.Policy(p.Spec.Name)
		place := policy.Placement()
		one := recording.Pool{
			Name: p.Spec.Name, Late: place.Late, Roles: policy.AutoRoles, AnswerWeight: place.AnswerWeight,
			Split: map[picker.Split]string{picker.SplitAuto: "auto", picker.SplitAlways: "always",
				picker.SplitNever: "never"}[place.Split],
			MaxWait: policy.Waiting.MaxTime.Seconds(), TTFT: place.Promise.TTFT, TPOT: place.Promise.TPOT,
			StepTokens: place.Model.StepTokens, TokenBytes: p.TokenBytes(), Answer: kvstate.AnswerTokens(p, ""),
		}
		state.View(p, nil, &v)
		for i := range v.Endpoints {
			one.Engines = append(one.Engines, knownEngine(&v.Endpoints[i], one.TokenBytes, now))
		}
		out.Pools = append(out.Pools, one)
	}
	return out
}

func knownEngine(c *kvstate.Candidate, tokenBytes float64, now time.Time) recording.Engine {
	e := c.Endpoint
	out := recording.Engine{
		Address: e.Addr, Role: e.Role.String(), Kind: e.Engine, KV: max(c.KVTokens, 0), Speed: finite(c.Speed),
		Pace: finite(c.Step), Link: finite(c.Transfer), Out: !c.Usable,
	}
	if c.Word != 0 {
		out.Word = c.Word.String()
	}
	if g := c.Signals; g != nil {
		out.Host = g.Host.Tokens + int64(float64(g.Host.Bytes)/cmp.Or(tokenBytes, kvstate.TokenBytes))
		if g.Trust(now) > 0 {
			out.Outside = max(g.External, 0)
		}
	}
	return out
}

// finite returns x, and 0 for what JSON cannot write.
func finite(x float64) float64 {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return 0
	}
	return x
}
