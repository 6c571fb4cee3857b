//go:build cgo

package main

import (
	"fmt"
	"os"
	"strings"
	"sync"

	"tandem/carrier/replicas"
	"tandem/internal/version"
	"tandem/replica"
)

// builtAs is set by the linker, like the one in cmd/tandem.
var builtAs string

// all are the replicas of this Envoy.
var all = sync.OnceValue(func() *replicas.All {
	return replicas.New(replica.Settings{Release: version.Text(builtAs), HotRestart: restartsHot(os.Args)},
		os.Getenv("TANDEM_OPERATOR"))
})

// configured is one configuration of the filter.
type configured struct {
	from  *replicas.Configured
	calls *calls
}

// restartsHot reports whether Envoy's command line has the number of a hot restart: there is a process before this one.
func restartsHot(args []string) bool {
	for i, a := range args {
		name, epoch, found := strings.Cut(a, "=")
		if !found && i+1 < len(args) {
			epoch = args[i+1]
		}
		if name == "--restart-epoch" && epoch != "0" {
			return true
		}
	}
	return false
}

// complain says on stderr why a configuration is refused: Envoy says only that it is.
func complain(err error) { fmt.Fprintln(os.Stderr, "tandem:", err) }
