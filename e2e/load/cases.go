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
}

func (c testCase) name() string {
	kind, loop := "JSON", count(c.Clients, "client")
	if c.Stream {
		kind = "SSE"
	}
	if c.Share > 0 {
		loop = fmt.Sprintf("open loop at %.0f %%", 100*c.Share)
	}
	return fmt.Sprintf("%s %s, %s, %d endpoints, %s", size(c.Size), kind, loop, c.Endpoints,
		count(c.Replicas, "replica"))
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

// cases returns all cases; cases with the same stand follow each other.
func cases(full bool) []testCase {
	if full {
		return fullCases()
	}
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
		{Size: kb, Clients: 16, Endpoints: 4, Replicas: 4},
	}
}

func fullCases() (out []testCase) {
	for _, replicas := range []int{1, 4} {
		for _, bytes := range []int{kb, 16 * kb, 220 * kb, mb} {
			for _, clients := range []int{1, 16, 64, 256, 512} {
				out = append(out, testCase{Size: bytes, Clients: clients, Endpoints: 4, Replicas: replicas})
			}
			for _, share := range []float64{0.5, 0.8} {
				out = append(out, testCase{Size: bytes, Clients: 64, Share: share, Endpoints: 4, Replicas: replicas})
			}
		}
		for _, clients := range []int{1, 16, 128, 512} {
			out = append(out, testCase{Size: kb, Stream: true, Clients: clients, Endpoints: 4, Replicas: replicas})
		}
		out = append(out, testCase{Size: kb, Stream: true, Clients: 128, Share: 0.5, Endpoints: 4, Replicas: replicas})
	}
	for _, endpoints := range []int{2, 16, 64, 256, 512} {
		for _, bytes := range []int{kb, 220 * kb} {
			out = append(out, testCase{Size: bytes, Clients: 64, Endpoints: endpoints, Replicas: 1})
		}
	}
	return out
}
