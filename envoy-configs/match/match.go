// Package match makes conditions by which Envoy leaves filters out.
package match

import matcherv3 "github.com/cncf/xds/go/xds/type/matcher/v3"

// Predicate is a condition on a request or an answer.
type Predicate = matcherv3.Matcher_MatcherList_Predicate

// Text holds for a text itself.
func Text(text string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: text}}
}

// Prefix holds for texts with that prefix.
func Prefix(prefix string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: prefix}}
}

// Regex holds for texts that an RE2 expression matches as a whole.
func Regex(regex string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_SafeRegex{SafeRegex: &matcherv3.RegexMatcher{
		EngineType: &matcherv3.RegexMatcher_GoogleRe2{GoogleRe2: &matcherv3.RegexMatcher_GoogleRE2{}}, Regex: regex,
	}}}
}

// Not holds where another does not.
func Not(p *Predicate) *Predicate {
	return &Predicate{MatchType: &matcherv3.Matcher_MatcherList_Predicate_NotMatcher{NotMatcher: p}}
}

// All holds where all of them do.
func All(ps ...*Predicate) *Predicate {
	return &Predicate{MatchType: &matcherv3.Matcher_MatcherList_Predicate_AndMatcher{
		AndMatcher: &matcherv3.Matcher_MatcherList_Predicate_PredicateList{Predicate: ps},
	}}
}

// Any holds where one of at least two predicates holds.
func Any(ps ...*Predicate) *Predicate {
	return &Predicate{MatchType: &matcherv3.Matcher_MatcherList_Predicate_OrMatcher{
		OrMatcher: &matcherv3.Matcher_MatcherList_Predicate_PredicateList{Predicate: ps},
	}}
}
