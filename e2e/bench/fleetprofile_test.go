package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What `go tool pprof -traces -unit ms` prints is added up by purpose; a stack belongs to the first that it has.
func TestReadTraces(t *testing.T) {
	require.Equal(t, spentOn{"ext_proc": 30, "read": 350, "scheduler": 10, other: 5}, readTraces([]byte(`File: tandem
Type: cpu
Duration: 20s, Total samples = 395ms ( 2.0%)
-----------+-------------------------------------------------------
      10ms   runtime.mallocgc
             tandem/extproc/openai.(*document).scan
             tandem/extproc.(*Server).process
             google.golang.org/grpc.(*Server).serverWorker
-----------+-------------------------------------------------------
      20ms   syscall.Write (inline)
             tandem/extproc.(*Server).process
-----------+-------------------------------------------------------
     350ms   syscall.Write (inline)
             tandem/kvstate/redisstore/redisclient.(*countedConn).Write
             tandem/kvstate/redisstore.(*poolReplica).receive
-----------+-------------------------------------------------------
      10ms   runtime.futex
             runtime.schedule
             runtime.park_m
-----------+-------------------------------------------------------
       5ms   time.sendTime
-----------+-------------------------------------------------------
`)))
}
