// Package predicate writes the predicates of Envoy's matchers: what a text is, and how predicates are joined
// (xds.type.matcher.v3.Matcher).
package predicate

import (
	matcherv3 "github.com/cncf/xds/go/xds/type/matcher/v3"
)

// P is a predicate of a matcher's list.
type P = matcherv3.Matcher_MatcherList_Predicate

// Is matches a text.
func Is(text string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: text}}
}

// Begins matches texts that begin so.
func Begins(prefix string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: prefix}}
}

// Matches matches texts that an RE2 expression matches whole.
func Matches(regex string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_SafeRegex{SafeRegex: &matcherv3.RegexMatcher{
		EngineType: &matcherv3.RegexMatcher_GoogleRe2{GoogleRe2: &matcherv3.RegexMatcher_GoogleRE2{}}, Regex: regex,
	}}}
}

// Not is true if p is not.
func Not(p *P) *P {
	return &P{MatchType: &matcherv3.Matcher_MatcherList_Predicate_NotMatcher{NotMatcher: p}}
}

// All is true if all are; at least two.
func All(ps ...*P) *P {
	return &P{MatchType: &matcherv3.Matcher_MatcherList_Predicate_AndMatcher{AndMatcher: list(ps)}}
}

// Either is true if one is; at least two.
func Either(ps ...*P) *P {
	return &P{MatchType: &matcherv3.Matcher_MatcherList_Predicate_OrMatcher{OrMatcher: list(ps)}}
}

func list(ps []*P) *matcherv3.Matcher_MatcherList_Predicate_PredicateList {
	return &matcherv3.Matcher_MatcherList_Predicate_PredicateList{Predicate: ps}
}
