package sim

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRecordsRoundTrip(t *testing.T) {
	want := []record{
		newRecord("machine", "name", "a b", "note", "50%=half\nand\ttab\x00", "empty", ""),
		newRecord("latency", "ns", 5),
	}
	text := formatRecords(want)
	if line := "machine name=a%20b note=50%25=half%0Aand%09tab%00 empty=\nlatency ns=5\n"; string(text) != line {
		t.Errorf("text is %q, want %q", text, line)
	}
	got, err := parseRecords(text)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(record{}, pair{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMalformedRecords(t *testing.T) {
	for name, text := range map[string]string{
		"a word without a value": "fault gpu",
		"a value without a key":  "fault =3",
		"a bad escape":           "fault gpu=%zz",
	} {
		if got, err := parseRecords([]byte("ok\n" + text)); err == nil {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

func FuzzParseRecords(f *testing.F) {
	f.Add([]byte("machine name=a%20b\n\nfault gpu=3 kind=lost"))
	f.Add([]byte("x =\x00%"))
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := parseRecords(text)
		if (got == nil) == (err == nil) {
			t.Fatalf("got %v and error %v, want exactly one", got, err)
		}
		if err != nil {
			return
		}
		again, err := parseRecords(formatRecords(got))
		if err != nil {
			t.Fatalf("own text: %v", err)
		}
		if diff := cmp.Diff(got, again, cmp.AllowUnexported(record{}, pair{})); diff != "" {
			t.Errorf("(-first +second):\n%s", diff)
		}
	})
}
