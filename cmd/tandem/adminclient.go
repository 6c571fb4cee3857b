package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"tandem/replica/config"
	"tandem/replica/orders"
	"tandem/status"
	"tandem/status/words"
)

// adminClient talks to the admin port of a running replica.
type adminClient struct {
	file, address, tokenFile, output string // flags

	scope string // more of a query: "&scope=replica", or ""
	about string // which replicas the last answer is about, if not all ([status.ScopeHeader])
	holds string // which replicas the last order holds for, as orders.Holds; "": it does not say
	warns string // what the last order leaves without endpoints; "": nothing
}

// register adds the flags by which a command finds a replica and prints what it answers.
func (a *adminClient) register(c *cobra.Command) {
	f := c.Flags()
	fileFlag(f, &a.file, "configuration `FILE` (YAML), for the address and the token of the admin port")
	f.StringVar(&a.address, "admin", "127.0.0.1:9090", "admin port of the replica: `ADDRESS`")
	f.StringVar(&a.tokenFile, "token-file", "", "`FILE` with the operator's token (admin.tokenFile)")
	f.StringVarP(&a.output, "output", "o", "table", "`FORMAT`: table or json")
	c.PreRunE = func(c *cobra.Command, _ []string) error { return a.settle(c) }
}

// settle takes from the configuration what no flag has set.
func (a *adminClient) settle(c *cobra.Command) error {
	if a.output != "table" && a.output != "json" {
		return fmt.Errorf("--output: %q is not table or json", a.output)
	}
	a.address = strings.TrimSuffix(strings.TrimPrefix(a.address, "http://"), "/") // as docs name the page
	if _, port, err := net.SplitHostPort(a.address); err != nil || port == "" {
		return fmt.Errorf("--admin: %q is not host:port", a.address)
	}
	if !c.Flags().Changed("file") {
		if _, err := os.Stat(a.file); err != nil || c.Flags().Changed("admin") {
			return nil //nolint:nilerr // a machine without a configuration, or with that of another replica
		}
	}
	admin, faulty, err := config.LoadAdmin(a.file)
	if err != nil {
		return err
	}
	if faulty { // the server may run with the former file
		fmt.Fprintf(c.ErrOrStderr(), "warning: %s has errors (tandem serve --check -f %s); its admin section is used\n",
			a.file, a.file)
	}
	if !c.Flags().Changed("admin") {
		a.address = config.Reached(admin.GetListen())
	}
	if a.tokenFile == "" {
		a.tokenFile = admin.GetTokenFile()
	}
	return nil
}

const (
	maxAnswer    = 16 << 20 // of what is read of a replica's answer: ten minutes of points are some 300 KB
	answerWithin = 5 * time.Second
)

// get reads a page of the replica's admin port.
func (a *adminClient) get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	_, text, err := a.do(ctx, http.MethodGet, path, nil)
	return text, err
}

// order sends an order, which needs the operator's token, and returns the status with the answer.
func (a *adminClient) order(ctx context.Context, method, path string, body any, wait time.Duration) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, wait+answerWithin)
	defer cancel()
	if a.tokenFile == "" {
		return 0, nil, errors.New("an order needs the operator's token: --token-file FILE, or -f FILE with admin.tokenFile")
	}
	return a.do(ctx, method, path, body)
}

func (a *adminClient) do(ctx context.Context, method, path string, body any) (int, []byte, error) {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return 0, nil, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+a.address+path, bytes.NewReader(text))
	if err != nil {
		return 0, nil, fmt.Errorf("--admin: %w", err)
	}
	if a.tokenFile != "" && method != http.MethodGet {
		token, err := orders.ReadToken(a.tokenFile)
		if err != nil {
			return 0, nil, fmt.Errorf("reading the token (paths are relative to the working directory): %w", err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, fmt.Errorf("asking the replica (is it running, is --admin right?): %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	a.about = resp.Header.Get(status.ScopeHeader)
	a.holds, a.warns = resp.Header.Get(orders.HoldsFor), resp.Header.Get(orders.Warning)
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return 0, nil, fmt.Errorf("reading the replica's answer: %w", err)
	}
	if resp.StatusCode >= http.StatusMultipleChoices {
		var refused struct{ Error struct{ Message string } }
		if json.Unmarshal(answer, &refused) != nil || refused.Error.Message == "" {
			refused.Error.Message = strings.TrimSpace(string(answer))
		}
		return resp.StatusCode, nil, fmt.Errorf("the replica at %s answers %s: %.500s",
			a.address, resp.Status, refused.Error.Message)
	}
	return resp.StatusCode, answer, nil
}

// query prints a page of the replica's admin port: as it came, or as a table. If the page lacks replicas that were not
// left out by flag, it says so on standard error.
func (a *adminClient) query(c *cobra.Command, path string, into any, table func(io.Writer)) error {
	answer, err := a.get(c.Context(), path)
	if err != nil {
		return err
	}
	if a.about != "" && a.scope == "" {
		fmt.Fprintln(c.ErrOrStderr(), "asked: "+words.Plain(a.about))
	}
	return a.show(c.OutOrStdout(), c.OutOrStdout(), answer, into, table)
}

// show prints an answer to w: as it came, or as a table, coloured if the command's output is a terminal.
func (a *adminClient) show(w, output io.Writer, answer []byte, into any, table func(io.Writer)) error {
	if a.output == "json" {
		_, err := words.Escaped(w).Write(answer)
		return err
	}
	answer, err := words.PlainJSON(answer)
	if err == nil {
		err = json.Unmarshal(answer, into)
	}
	if err != nil {
		return fmt.Errorf("reading the replica's answer: %w", err)
	}
	var text bytes.Buffer
	table(&text)
	_, err = io.WriteString(w, coloured(output, text.String()))
	return err
}

// coloured paints what needs attention red and headings bold, on a terminal that has not been asked for plain text
// (NO_COLOR).
func coloured(w io.Writer, text string) string {
	if !isTerminal(w) || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return text
	}
	return words.Paint(text)
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
