package mps

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParsePIDs(t *testing.T) {
	for answer, want := range map[string][]int{
		"": nil, "\n": nil, "12\n": {12}, "12\n 7 \n": {12, 7}, "3": {3}, "1\n2\n3\n4\n": {1, 2, 3, 4},
	} {
		got, err := parsePIDs(answer, 4)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%q: %v, -want +got\n%s", answer, err, diff)
		}
	}
	for _, answer := range []string{"Server 12 not found", "-1", "0", "12 13", "99999999999", strings.Repeat("1\n", 5)} {
		if got, err := parsePIDs(answer, 4); err == nil {
			t.Errorf("%.40q: %v and no error", answer, got)
		}
	}
}

func TestParsePercentage(t *testing.T) {
	for answer, want := range map[string]float64{"50.0\n": 50, "100": 100, "0.5": 0.5} {
		if got, err := parsePercentage(answer); got != want || err != nil {
			t.Errorf("%q: %v, %v", answer, got, err)
		}
	}
	for _, answer := range []string{"", "0", "-5", "101", "NaN", "50%", "Unknown command"} {
		if got, err := parsePercentage(answer); err == nil {
			t.Errorf("%q: %v and no error", answer, got)
		}
	}
}

// The real program prints sizes of a gigabyte and more in gigabytes, rounded down.
func TestMemoryLimit(t *testing.T) {
	for answer, matching := range map[string]map[uint64]bool{
		"":       {0: true, 512: false},
		"512M\n": {512: true, 513: false, 1024: false},
		"1G":     {1024: true, 1500: true, 2047: true, 2048: false, 1023: false},
		"1500M":  {1500: true, 1501: false},
	} {
		l, err := parseMemoryLimit(answer)
		if err != nil {
			t.Errorf("%q: %v", answer, err)
		}
		for mib, want := range matching {
			if l.matches(mib) != want {
				t.Errorf("%q for %d MiB: %t", answer, mib, !want)
			}
		}
	}
	for _, answer := range []string{"M", "512", "-1M", "1.5G", "512 MB", "512M 1G", "9999999999999999999G", "é"} {
		if l, err := parseMemoryLimit(answer); err == nil {
			t.Errorf("%q: %v and no error", answer, l)
		}
	}
}

func TestExcerptsAreQuotedASCII(t *testing.T) {
	if got := excerpt(" a\x00\x1b[31m\né" + strings.Repeat("x", 100)); got != `"a\x00\x1b[31m\n\u00e9`+strings.Repeat(
		"x",
		70,
	)+`..."` {
		t.Errorf("got %s", got)
	}
}

func FuzzAnswers(f *testing.F) {
	for _, s := range []string{"", "12\n13\n", "50.0", "4G", "512M", "Server 1 not found", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, answer string) {
		if list, err := parsePIDs(answer, 4); err != nil && list != nil {
			t.Errorf("%v and %v", list, err)
		}
		if n, err := parsePercentage(answer); (err == nil) != (n > 0 && n <= 100) {
			t.Errorf("%v and %v", n, err)
		}
		if l, err := parseMemoryLimit(answer); err != nil && l != (memoryLimit{}) {
			t.Errorf("%v and %v", l, err)
		}
		for _, c := range excerpt(answer) {
			if c < ' ' || c > '~' {
				t.Errorf("%q in an excerpt", c)
			}
		}
	})
}
