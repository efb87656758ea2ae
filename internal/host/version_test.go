package host

import (
	"slices"
	"testing"
)

func TestParse(t *testing.T) {
	for s, want := range map[string][]int{
		"580.126.09": {580, 126, 9}, "13.0": {13, 0}, "7": {7}, "0.999999999": {0, 999999999},
		"": nil, ".": nil, "580.": nil, ".1": nil, "580..1": nil, "580.x": nil, "580.1-rc": nil, "-1.2": nil,
		"+1.2": nil, "1.0000000001": nil, "1_0.2": nil, "٣.1": nil, " 1.2": nil,
	} {
		if got, err := ParseVersion(s); !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("Parse(%q) = %v, %v; want %v", s, got, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("580.126.09")
	f.Fuzz(func(t *testing.T, s string) {
		numbers, err := ParseVersion(s)
		if (numbers == nil) == (err == nil) || slices.ContainsFunc(numbers, func(n int) bool { return n < 0 }) {
			t.Errorf("Parse(%q) = %v, %v", s, numbers, err)
		}
	})
}
