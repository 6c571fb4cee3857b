package main

// #include "abi.h"
import "C"

import (
	"runtime"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"tandem/carrier/filter"
)

// calls are the calls that outlive the request that made them: Envoy's calls of the filter's configuration, which its
// main thread makes.
type calls struct {
	envoy unsafe.Pointer // the configuration

	mu        sync.Mutex
	scheduler unsafe.Pointer // nil: none was needed yet
	waiting   []sending      // for the main thread
	running   map[uint64]func(*filter.Answer)
	closed    bool
}

// detached implements [filter.Detached].
type detached struct {
	calls   *calls
	call    filter.Call
	headers []filter.Header
}

type sending struct {
	call *detached
	done func(*filter.Answer)
}

func newCalls() *calls { return &calls{running: map[uint64]func(*filter.Answer){}} }

// Detach implements [filter.Envoy].
func (s *stream) Detach(c *filter.Call) filter.Detached {
	d := &detached{calls: s.config.calls, call: *c}
	d.call.Body, d.call.Cluster = slices.Clone(c.Body), strings.Clone(c.Cluster)
	s.EachHeader(func(name, value []byte) {
		if !c.Drops(name) {
			d.headers = append(d.headers, filter.Header{Name: string(name), Value: string(value)})
		}
	})
	d.headers = append(d.headers, c.Set...)
	return d
}

// Send implements [filter.Detached].
func (d *detached) Send(done func(*filter.Answer)) {
	c := d.calls
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		go done(&filter.Answer{})
		return
	}
	if c.scheduler == nil {
		c.scheduler = C.envoy_dynamic_module_callback_http_filter_config_scheduler_new(c.envoy)
	}
	c.waiting = append(c.waiting, sending{d, done})
	C.envoy_dynamic_module_callback_http_filter_config_scheduler_commit(c.scheduler, 0)
}

// send makes the calls that wait, on the main thread.
func (c *calls) send() {
	c.mu.Lock()
	all := c.waiting
	c.waiting = nil
	c.mu.Unlock()
	for _, s := range all {
		c.make(s)
	}
}

func (c *calls) make(s sending) {
	var pin runtime.Pinner
	defer pin.Unpin()
	d := s.call
	headers := appendHeaders(&pin, nil, d.headers)
	pin.Pin(&headers[0])
	var id C.uint64_t
	result := C.envoy_dynamic_module_callback_http_filter_config_http_callout(c.envoy, &id,
		pinned(&pin, d.call.Cluster), &headers[0], C.size_t(len(headers)), pinnedBytes(&pin, d.call.Body),
		C.uint64_t(d.call.Timeout.Milliseconds()))
	if result != 0 {
		s.done(&filter.Answer{})
		return
	}
	c.mu.Lock()
	c.running[uint64(id)] = s.done
	c.mu.Unlock()
}

// done ends a call.
func (c *calls) done(id uint64, a *filter.Answer) {
	c.mu.Lock()
	done := c.running[id]
	delete(c.running, id)
	c.mu.Unlock()
	if done != nil {
		done(a)
	}
}

// close ends all calls with the configuration.
func (c *calls) close() {
	c.mu.Lock()
	all, running := c.waiting, c.running
	c.waiting, c.running, c.closed = nil, nil, true
	if c.scheduler != nil {
		C.envoy_dynamic_module_callback_http_filter_config_scheduler_delete(c.scheduler)
		c.scheduler = nil
	}
	c.mu.Unlock()
	for _, s := range all {
		s.done(&filter.Answer{})
	}
	for _, done := range running {
		done(&filter.Answer{})
	}
}
