package sim

import (
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

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
	testenv.Must(t, err)
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(record{}, pair{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
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
