package wake

import "testing"

func TestWakeUpsBeforeAReceiveCountAsOne(t *testing.T) {
	c := New()
	for range 3 {
		c.Wake()
	}
	<-c
	select {
	case <-c:
		t.Error("a second receive returns too")
	default:
	}
	c.Wake()
	<-c
}
