package quantity

import (
	"errors"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// What each text is in Kubernetes, the module test/devicemanager compares with resource.Quantity itself.
func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"0": "0", "-0": "0", "+7": "7", "2": "2", "2.0": "2", "2.": "2", ".5": "500m", "007": "7", "500m": "500m",
		"1000m": "1", "1500m": "1500m", "0.1": "100m", "1e3": "1k", "1E3": "1k", "12e-1": "1200m", "2k": "2k",
		"1500000": "1500k", "3E": "3E", "1.5k": "1500", "100u": "100u", "1n": "1n", "0.1n": "1n", "-0.1n": "-1n",
		"1.0000000001": "1000000001n", "16Gi": "16Gi", "1.5Gi": "1536Mi", "1024Mi": "1Gi", "512Ki": "512Ki",
		"1023": "1023", "0.5Ki": "512", "0.0001Ki": "102400u", "-1Gi": "-1Gi", "9223372036854775807": "9223372036854775807",
		"7Ei": "7Ei", "0Gi": "0",
	} {
		q, err := Parse(text)
		if err != nil || q.String() != want {
			t.Errorf("%q: %s, want %s (%v)", text, q, want, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{
		"", "x", "-", "+", ".", "Gi", "1 ", " 1", "1K", "1mi", "1KI", "1gb", "1e", "1e+", "1e1.5", "1e999", "e3", "0x10",
		"1_000", "1,5", "٣", "1\n", "1e101", "9223372036854775808", "9E9E", "8Ei", "10E", "-10E", "NaN", "1mm",
		"00000000000000000000000000000000000000000000000000000000000000001",
	} {
		if q, err := Parse(text); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %s, and %v", text, q, err)
		}
	}
}

func TestArithmeticKeepsTheFormat(t *testing.T) {
	half, err := Parse("0.5")
	testenv.Must(t, err)
	for name, c := range map[string]struct {
		got  Quantity
		want string
	}{
		"decimal":                        {New(4, Decimal).Sub(half), "3500m"},
		"binary":                         {New(4096, Binary).Sub(New(1024, Decimal)), "3Ki"},
		"binary that is not whole":       {New(4096, Binary).Sub(half), "4095500m"},
		"binary below 1024":              {New(2000, Binary).Sub(New(1000, Binary)), "1k"},
		"binary that no suffix divides":  {New(1025, Binary), "1025"},
		"decimal that suffixes divide":   {New(1024, Decimal).Add(New(976, Decimal)), "2k"},
		"binary with the largest suffix": {New(4<<60, Binary), "4Ei"},
		"below zero":                     {New(1, Decimal).Sub(New(2, Decimal)), "-1"},
		"nothing":                        {Quantity{}, "0"},
	} {
		if got := c.got.String(); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

func TestWhole(t *testing.T) {
	for text, want := range map[string]int64{"2": 2, "2k": 2000, "2Ki": 2048, "3000m": 3, "-1": -1, "0": 0} {
		q, err := Parse(text)
		if n, ok := q.Whole(); err != nil || !ok || n != want {
			t.Errorf("%s: %d %t, want %d (%v)", text, n, ok, want, err)
		}
	}
	q, err := Parse("1500m")
	if n, ok := q.Whole(); err != nil || ok {
		t.Errorf("1500m: %d is whole (%v)", n, err)
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{"1.5Gi", "500m", "-1e-9", "9223372036854775807", "0.00000000001Ki"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		q, err := Parse(text)
		if err != nil {
			if !errors.Is(err, ErrInvalid) || q.Sign() != 0 {
				t.Errorf("%q: %s and %v", text, q, err)
			}
			return
		}
		again, err := Parse(q.String())
		if err != nil || again.Sub(q).Sign() != 0 || again.String() != q.String() {
			t.Errorf("%q is %s, and that is %s (%v)", text, q, again, err)
		}
	})
}
