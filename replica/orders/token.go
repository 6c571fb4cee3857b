package orders

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// minToken is the minimum length of a token, and maxTokenFile the maximum that is read of its file.
const (
	minToken     = 16
	maxTokenFile = 4 << 10
)

func sameToken(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// OperatorToken returns a function that reports whether a request has the operator's token; nil if there is no token.
// A wrong one can come from anywhere, so the file is read once a second at most.
func OperatorToken(file string) func([]byte) bool {
	if file == "" {
		return nil
	}
	var mu sync.Mutex
	var read time.Time
	var token string
	return func(got []byte) bool {
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now(); now.Sub(read) > time.Second {
			read = now
			token, _ = ReadToken(file)
		}
		return token != "" && sameToken(string(got), token)
	}
}

// ReadToken reads the operator's token from a file: one line of at least 16 characters.
func ReadToken(file string) (string, error) {
	if file == "" {
		return "", errors.New("admin.tokenFile is not set")
	}
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxTokenFile+1))
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(text))
	if len(token) < minToken || len(text) > maxTokenFile || strings.ContainsAny(token, "\r\n") {
		return "", fmt.Errorf("%s: not one line of %d to %d characters", file, minToken, maxTokenFile)
	}
	return token, nil
}
