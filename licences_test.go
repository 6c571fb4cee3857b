package tandem_test

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write NOTICE, and the picture of docs/design.md")

// licences are those that a module in our binaries may have, each with sentences that only its text has. A text with
// words of forbidden in it is none of them, whatever else it says.
var licences = []struct {
	name string
	text []string
}{
	{"Apache-2.0", []string{"Apache License Version 2.0", "Grant of Copyright License"}},
	{"MIT", []string{"Permission is hereby granted, free of charge, to any person obtaining a copy", `THE SOFTWARE IS PROVIDED "AS IS"`}},
	{"BSD-3-Clause", []string{"Redistributions in binary form must reproduce the above copyright notice", "to endorse or promote products derived from"}},
	{"BSD-2-Clause", []string{"Redistributions in binary form must reproduce the above copyright notice"}},
	{"ISC", []string{"Permission to use, copy, modify, and/or distribute this software for any purpose", "THE SOFTWARE IS PROVIDED"}},
}

var forbidden = regexp.MustCompile(`(?i)GNU (Lesser |Affero )?General Public License|Mozilla Public License|Eclipse Public License|` +
	`Server Side Public License|Business Source License|Commons Clause|non-?commercial`)

// licenceOf names the licences in a text, the first one first; empty where it is none that we may use.
func licenceOf(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if forbidden.MatchString(text) {
		return ""
	}
	var names []string
	for _, l := range licences {
		has := !slices.ContainsFunc(l.text, func(s string) bool { return !strings.Contains(text, s) })
		if has && !(l.name == "BSD-2-Clause" && slices.Contains(names, "BSD-3-Clause")) {
			names = append(names, l.name)
		}
	}
	return strings.Join(names, ", ")
}

func TestLicenceOf(t *testing.T) {
	ours, err := os.ReadFile("LICENSE")
	require.NoError(t, err)
	require.Equal(t, "Apache-2.0", licenceOf(string(ours)))
	require.Contains(t, string(ours), "Copyright The Tandem Authors")
	mit := "Permission is hereby granted, free of charge, to any person\nobtaining a copy of it. THE SOFTWARE IS PROVIDED \"AS IS\""
	require.Equal(t, "MIT", licenceOf(mit))
	require.Empty(t, licenceOf(mit+" but for non-commercial use"))
	require.Empty(t, licenceOf("GNU GENERAL PUBLIC LICENSE Version 3"))
	require.Empty(t, licenceOf("All rights reserved."))
}

// TestNotice holds NOTICE to the modules that the binaries contain: each has a licence that allows what we do, and its
// texts and notices are passed on as it asks. Modules come from Go's module cache.
func TestNotice(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f",
		"{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}", "./cmd/tandem", "./cmd/enginesim").Output()
	require.NoError(t, err)
	modules := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if name, dir, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			modules[name] = dir
		}
	}
	require.NotEmpty(t, modules)
	modules["the Go standard library"] = modules["golang.org/x/sys"] // same authors, same text

	table, texts, order := "", map[string][]string{}, []string(nil)
	for _, name := range slices.Sorted(maps.Keys(modules)) {
		licence, found := "", textsOf(t, modules[name])
		for _, text := range found {
			if l := licenceOf(text); l != "" && !strings.Contains(licence, l) {
				licence = strings.TrimPrefix(licence+", "+l, ", ")
			}
			if text == licenceText(t) || canonicalApache(text) {
				continue // LICENSE has it
			}
			if texts[text] == nil {
				order = append(order, text)
			}
			texts[text] = append(texts[text], name)
		}
		require.NotEmpty(t, licence, "%s: no licence that we may use in %s", name, modules[name])
		table += fmt.Sprintf("  %-70s %s\n", name, licence)
	}
	want := "Tandem\nCopyright The Tandem Authors\n\nTandem is licensed under the Apache License 2.0; see LICENSE.\n\n" +
		"The programs tandem and enginesim contain the modules below, under these licences. The texts that they\n" +
		"ask to be passed on follow; that of the Apache License is in LICENSE.\n\n" + table
	for _, text := range order {
		want += "\n" + strings.Repeat("-", 80) + "\n" + strings.Join(texts[text], "\n") + "\n\n" + strings.TrimSpace(text) + "\n"
	}
	if *update {
		require.NoError(t, os.WriteFile("NOTICE", []byte(want), 0o644))
	}
	got, err := os.ReadFile("NOTICE")
	require.NoError(t, err)
	require.Equal(t, want, string(got), "the binaries' modules changed: go test . -run TestNotice -update")
}

// textsOf are a module's licence and notice files.
func textsOf(t *testing.T, dir string) (out []string) {
	t.Helper()
	for _, pattern := range []string{"LICEN[SC]E*", "COPYING*", "NOTICE*"} {
		files, err := filepath.Glob(filepath.Join(dir, pattern))
		require.NoError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			out = append(out, strings.ReplaceAll(string(text), "\r\n", "\n"))
		}
	}
	return out
}

func licenceText(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("LICENSE")
	require.NoError(t, err)
	return string(text)
}

// canonicalApache reports whether a text is the Apache License and nothing else. Copies differ in blanks, in the
// appendix and in who holds the copyright.
func canonicalApache(text string) bool {
	return licenceOf(text) == "Apache-2.0" && len(text) < 12_000
}
