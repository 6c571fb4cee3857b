package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	configv1 "tandem/protos/config/v1"
	"tandem/status"
)

// showStatus prints what a running replica does, once or, with --watch, until ctx ends.
func showStatus(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("tandem status", flag.ContinueOnError)
	flags.SetOutput(stderr)
	file := flags.String("f", "", "configuration `file` (YAML), for the address of the admin port")
	address := flags.String("admin", "127.0.0.1:9090", "admin port of the replica: `address`")
	watch := flags.Bool("watch", false, "keep it fresh, once a second, until Ctrl-C")
	asJSON := flags.Bool("json", false, "print the JSON that the page is drawn from")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *file != "" {
		config, _, err := configv1.Load(*file)
		if err != nil {
			return err
		}
		*address = onLoopback(config.GetAdmin().GetListen())
	}
	url := "http://" + *address + "/status.json"
	if !*watch {
		return printStatus(ctx, url, *asJSON, stdout)
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		var screen strings.Builder
		if err := printStatus(ctx, url, *asJSON, &screen); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			fmt.Fprintln(&screen, err) // it may come back
		}
		fmt.Fprint(stdout, "\x1b[H\x1b[2J", screen.String())
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// onLoopback is where an address is reached from this machine that listens on every interface.
func onLoopback(listen string) string {
	host, port, err := net.SplitHostPort(listen)
	if ip := net.ParseIP(host); err == nil && ip != nil && ip.IsUnspecified() {
		return net.JoinHostPort("127.0.0.1", port)
	}
	return listen
}

// maxStatus bounds what is read of a replica's answer: ten minutes of points are some 300 KB.
const maxStatus = 16 << 20

func printStatus(ctx context.Context, url string, asJSON bool, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("asking the replica (is it running, is -admin right?): %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return errors.New("asking the replica: " + resp.Status)
	}
	body := io.LimitReader(resp.Body, maxStatus)
	if asJSON {
		_, err := io.Copy(w, body)
		return err
	}
	var s status.Status
	if err := json.NewDecoder(body).Decode(&s); err != nil {
		return fmt.Errorf("reading the replica's answer: %w", err)
	}
	status.Print(w, &s)
	return nil
}
