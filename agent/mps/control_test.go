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
		got, err := parsePIDs(answer)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%q: %v, -want +got\n%s", answer, err, diff)
		}
	}
	for _, answer := range []string{"Server 12 not found", "-1", "0", "12 13", "99999999999"} {
		if got, err := parsePIDs(answer); err == nil {
			t.Errorf("%.40q: %v and no error", answer, got)
		}
	}
}

func TestIsPercentage(t *testing.T) {
	for answer, want := range map[string]bool{
		"50.0\n": true, "50": true, "49.6": true, "49": false, "0.5": false, "100": false,
	} {
		if got, err := isPercentage(answer, 50); got != want || err != nil {
			t.Errorf("%q: %t, %v", answer, got, err)
		}
	}
	for _, answer := range []string{"", "0", "-5", "101", "NaN", "50%", "Unknown command"} {
		if got, err := isPercentage(answer, 50); got || err == nil {
			t.Errorf("%q: %t and no error", answer, got)
		}
	}
}

// The real program prints sizes of a gigabyte and more in gigabytes, rounded down.
func TestIsMemoryLimit(t *testing.T) {
	for answer, matching := range map[string]map[uint64]bool{
		"":       {512: false},
		"512M\n": {512: true, 513: false, 1024: false},
		"0G":     {512: false},
		"1G":     {1024: true, 1500: true, 2047: true, 2048: false, 1023: false},
		"1500M":  {1500: true, 1501: false},
	} {
		for mib, want := range matching {
			if got, err := isMemoryLimit(answer, mib); got != want || err != nil {
				t.Errorf("%q for %d MiB: %t, %v", answer, mib, got, err)
			}
		}
	}
	for _, answer := range []string{"M", "512", "-1M", "1.5G", "512 MB", "512M 1G", "9999999999999999999G", "é"} {
		if got, err := isMemoryLimit(answer, 512); got || err == nil {
			t.Errorf("%q: %t and no error", answer, got)
		}
	}
}

func FuzzAnswers(f *testing.F) {
	for _, s := range []string{"", "12\n13\n", "50.0", "4G", "512M", "Server 1 not found", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, answer string) {
		if list, err := parsePIDs(answer); err != nil && list != nil {
			t.Errorf("%v and %v", list, err)
		}
		if is, err := isPercentage(answer, 50); is && err != nil {
			t.Errorf("%t and %v", is, err)
		}
		if is, err := isMemoryLimit(answer, 512); is && (err != nil || strings.TrimSpace(answer) != "512M") {
			t.Errorf("%t and %v", is, err)
		}
		for _, c := range quote(answer) {
			if c < ' ' || c > '~' {
				t.Errorf("%q in a quotation", c)
			}
		}
	})
}
