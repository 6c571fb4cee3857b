package main

import "fmt"

// testCase is one load.
type testCase struct {
	Size      int     // of the request's body, bytes
	Stream    bool    // 64 tokens, streamed, one each 5 ms; else 16 tokens as JSON, at once
	Clients   int     // at the same time; of an open loop: connections
	Share     float64 // open loop, at this part of the rate that the closed loop reached; 0: closed
	Rate      float64 // of an open loop, requests per second
	Endpoints int     // half of them prefill, half decode
	Replicas  int     // of Tandem
	Redis     bool    // replicas share their state through a Redis
}

func (c testCase) name() string {
	loop := count(c.Clients, "client")
	if c.Share > 0 {
		loop = fmt.Sprintf("open loop at %.0f %%", 100*c.Share)
	}
	return fmt.Sprintf("%s %s, %s, %d endpoints, %s", size(c.Size), c.kind(), loop, c.Endpoints, c.fleet())
}

// kind names the answers of a case.
func (c testCase) kind() string {
	if c.Stream {
		return "SSE"
	}
	return "JSON"
}

// fleet names the replicas of a case.
func (c testCase) fleet() string {
	if c.Redis {
		return count(c.Replicas, "replica") + " with Redis"
	}
	return count(c.Replicas, "replica")
}

// like returns the name of the closed loop from which an open one takes its rate.
func (c testCase) like() string {
	c.Share, c.Rate = 0, 0
	return c.name()
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func size(n int) string {
	if n >= 1<<20 {
		return fmt.Sprintf("%d MB", n>>20)
	}
	return fmt.Sprintf("%d KB", n>>10)
}

const kb, mb = 1 << 10, 1 << 20

// cases returns all cases of a suite; cases with the same stand follow each other.
func cases(suite string) ([]testCase, error) {
	switch suite {
	case "", "quick":
		return quickCases(), nil
	case "full":
		return fullCases(), nil
	case "replicas":
		return replicaCases(), nil
	}
	return nil, fmt.Errorf("-suite: %q is none of quick, full, replicas", suite)
}

func quickCases() []testCase {
	return []testCase{
		{Size: kb, Clients: 1, Endpoints: 4, Replicas: 1},
		{Size: kb, Clients: 16, Endpoints: 4, Replicas: 1},
		{Size: kb, Clients: 16, Share: 0.5, Endpoints: 4, Replicas: 1},
		{Size: kb, Clients: 128, Endpoints: 4, Replicas: 1},
		{Size: 220 * kb, Clients: 16, Endpoints: 4, Replicas: 1},
		{Size: mb, Clients: 16, Endpoints: 4, Replicas: 1},
		{Size: kb, Stream: true, Clients: 16, Endpoints: 4, Replicas: 1},
		{Size: kb, Stream: true, Clients: 16, Share: 0.5, Endpoints: 4, Replicas: 1},
		{Size: kb, Clients: 16, Endpoints: 64, Replicas: 1},
		{Size: kb, Clients: 16, Endpoints: 4, Replicas: 4, Redis: true},
	}
}

// replicaCases are the same few loads for each number of replicas.
func replicaCases() (out []testCase) {
	for _, c := range []testCase{{Replicas: 1}, {Replicas: 1, Redis: true}, {Replicas: 4, Redis: true},
		{Replicas: 8, Redis: true}} {
		c.Endpoints = 4
		for _, c.Size = range []int{kb, 220 * kb, mb} {
			for _, c.Clients = range []int{16, 64} {
				out = append(out, c)
			}
		}
		c.Size, c.Clients, c.Stream = kb, 16, true
		out = append(out, c)
	}
	return out
}

func fullCases() (out []testCase) {
	one := testCase{Endpoints: 4, Replicas: 1}
	out = sizes(out, one, []int{kb, 16 * kb, 220 * kb, mb}, []int{1, 16, 64, 256, 512}, []float64{0.5, 0.8})
	one.Size, one.Stream = kb, true
	out = sizes(out, one, []int{kb}, []int{1, 16, 128, 512}, nil)
	one.Clients, one.Share = 128, 0.5
	out = append(out, one)
	for _, replicas := range []int{1, 4, 8} {
		c := testCase{Endpoints: 4, Replicas: replicas, Redis: true}
		out = sizes(out, c, []int{kb, 220 * kb, mb}, []int{1, 16, 64, 256}, []float64{0.5})
		c.Stream = true
		out = sizes(out, c, []int{kb}, []int{16, 128}, nil)
	}
	for _, endpoints := range []int{2, 16, 64, 256, 512} {
		for _, bytes := range []int{kb, 220 * kb} {
			out = append(out, testCase{Size: bytes, Clients: 64, Endpoints: endpoints, Replicas: 1})
		}
	}
	return out
}

// sizes adds a case for each size and number of clients, and open loops of 64 clients.
func sizes(out []testCase, c testCase, sizes, clients []int, shares []float64) []testCase {
	for _, c.Size = range sizes {
		for _, c.Clients = range clients {
			out = append(out, c)
		}
		open := c
		open.Clients = 64
		for _, open.Share = range shares {
			out = append(out, open)
		}
	}
	return out
}
