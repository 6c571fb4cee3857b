package config

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	configv1 "tandem/protos/config/v1"
)

func checkState(v *validator, c *configv1.Config) {
	r := c.State.GetRedis()
	if r == nil {
		return
	}
	const path = "state.redis"
	u := checkRedisURL(v, path+".url", r.Url)
	if u == nil {
		return
	}
	for i, node := range r.Nodes {
		checkAddress(v, fmt.Sprintf("%s.nodes[%d]", path, i), node)
	}
	switch {
	case r.Mode == "single" && len(r.Nodes) > 0:
		v.m.add(path+".nodes", "a single Redis has one node, that of the url: set mode to cluster or sentinel")
	case r.Mode == "sentinel" && r.SentinelMaster == "":
		v.m.add(path+".sentinelMaster", "is missing: what the Sentinels call the master")
	case r.Mode != "sentinel" && r.SentinelMaster != "":
		v.m.add(path+".sentinelMaster", "has no effect unless mode is sentinel")
	case r.Mode == "cluster" && strings.Trim(u.Path, "/0") != "":
		v.m.add(path+".url", "a Cluster has no database but 0")
	}
	if _, set := u.User.Password(); set && r.PasswordFile != "" {
		v.m.add(path+".passwordFile", "the url has a password too: take one out")
	}
	if r.KeyPrefix == "" || len(r.KeyPrefix) > 100 || strings.ContainsFunc(r.KeyPrefix, notInPrefix) {
		v.m.add(path+".keyPrefix", "%.100q is not made of letters, digits and - _ . :", r.KeyPrefix)
	}
	checkRedisTLS(v, path+".tls", u.Scheme, r.Tls)
}

// checkRedisURL returns the parsed URL; nil if it is missing or not valid.
func checkRedisURL(v *validator, path, text string) *url.URL {
	const form = "redis://[user:password@]host:port/db"
	if text == "" {
		v.m.add(path, "is missing: "+form)
		return nil
	}
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || !slices.Contains([]string{"redis", "rediss"}, u.Scheme) || !isDatabase(u.Path) {
		v.m.add(path, "is not of the form "+form) // without the value: it may hold a password
		return nil
	}
	return u
}

func isDatabase(path string) bool {
	if path = strings.Trim(path, "/"); path == "" {
		return true
	}
	_, err := strconv.ParseUint(path, 10, 16)
	return err == nil
}

// notInPrefix excludes braces, which a Redis Cluster would take for a hash tag.
func notInPrefix(r rune) bool { return notInName(r) && r != '.' && r != ':' }

func checkRedisTLS(v *validator, path, scheme string, t *configv1.RedisTls) {
	if t == nil {
		return
	}
	if scheme != "rediss" {
		v.m.add(path, "has no effect with redis://: write rediss://")
	}
	if (t.CertFile == "") != (t.KeyFile == "") {
		v.m.add(path+".keyFile", "certFile and keyFile belong together: set both or none")
	}
}

// checkSession checks the names by which sessions are identified.
func checkSession(v *validator, path string, k *configv1.SessionKey) {
	if k == nil {
		return
	}
	if k.Header == "" && k.Cookie == "" && k.Body == "" {
		v.m.add(path, "names nothing: set header, cookie or body")
	}
	if strings.ContainsFunc(k.Header, notInName) || strings.ContainsFunc(k.Cookie, notInName) {
		v.m.add(path, "header and cookie are made of letters, digits, - and _")
	}
}
