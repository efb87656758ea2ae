package node

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRemarksAreLoggedWhenTheyBeginChangeAndEnd(t *testing.T) {
	one := Remark{Key: "a", Level: slog.LevelWarn, Text: "A is wrong", Advice: "repair it"}
	worse := Remark{Key: "a", Level: slog.LevelError, Text: "A is worse"}
	note := Remark{Key: "b", Text: "B is so"}
	for name, c := range map[string]struct {
		before, now []Remark
		want        string
	}{
		"new":      {nil, []Remark{one, note}, "WARN A is wrong; repair it\nINFO B is so\n"},
		"the same": {[]Remark{one, note}, []Remark{note, one}, ""},
		"changed":  {[]Remark{one}, []Remark{worse}, "ERROR A is worse\n"},
		"ended":    {[]Remark{one, note}, []Remark{note}, "INFO no longer the case: A is wrong\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var log strings.Builder
			LogRemarks(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: withoutTime})), c.before, c.now)
			got := strings.NewReplacer("level=", "", "msg=", "", `"`, "").Replace(log.String())
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}
