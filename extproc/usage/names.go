package usage

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"sync"

	"github.com/cespare/xxhash/v2"
)

// bounded returns a name from outside or, if that is too long, its hash.
func bounded(name string) string {
	if len(name) > maxName {
		sum := sha256.Sum256([]byte(name))
		return "sha256-" + hex.EncodeToString(sum[:16])
	}
	return strings.ToValidUTF8(name, "?")
}

// names bounds the values of a label: the first names that were answered keep a value of their own, and the rest share
// a few. It is safe for concurrent use.
type names struct {
	mu   sync.Mutex
	most int
	seen map[string]struct{}
	rest func(name string) string
}

func newNames(most int, rest func(name string) string) *names {
	return &names{most: most, seen: map[string]struct{}{}, rest: rest}
}

// label returns the value for a name. answered: a request with it was answered, so it may take a place; else anybody
// could use the places up with names that nobody knows.
func (n *names) label(name string, answered bool) string {
	if name == "" {
		return ""
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, ok := n.seen[name]; !ok {
		if !answered || len(n.seen) >= n.most {
			return n.rest(name)
		}
		n.seen[name] = struct{}{}
	}
	return name
}

// group is the group of a tenant that has no series of its own.
func group(tenant string) string { return fmt.Sprintf("hash-%x", xxhash.Sum64String(tenant)&0xf) }

// maxModels bounds the models that metrics name: with models "*" clients choose names.
const maxModels = 200

func otherModel(string) string { return "other" }
