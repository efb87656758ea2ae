package hook

import (
	"cmp"
	"strconv"
	"strings"
)

// version is a driver's version, "580.126.09", as numbers. It is not a semantic version: it has two or three parts, and
// leading zeros.
type version []int

// parseVersion reads at least two numbers with dots between.
func parseVersion(s string) (version, bool) {
	var v version
	for part := range strings.SplitSeq(s, ".") {
		if part == "" || len(part) > 9 || strings.Trim(part, "0123456789") != "" {
			return nil, false
		}
		n, err := strconv.Atoi(part)
		if err != nil {
			return nil, false
		}
		v = append(v, n)
	}
	if len(v) < 2 {
		return nil, false
	}
	return v, true
}

// compare is negative if v is older than w. A part that is missing counts as 0.
func (v version) compare(w version) int {
	for i := range max(len(v), len(w)) {
		var a, b int
		if i < len(v) {
			a = v[i]
		}
		if i < len(w) {
			b = w[i]
		}
		if a != b {
			return cmp.Compare(a, b)
		}
	}
	return 0
}

// major is the driver's branch.
func (v version) major() int { return v[0] }
