package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"holdfast/orchestrator/engine"
)

// Tokenize has a prompt turned into token ids by any instance that is up, in the
// order of their names: the pool's instances serve one model, so that all would give
// the same. Errors are *engine.Error: with the cause engine.ErrNotCalled when no
// instance is up, otherwise what the last one said that may yet succeed, or any.
func (f *Fleet) Tokenize(ctx context.Context, request engine.TokenizeRequest) (ids []int32, err error) {
	err = f.askTokenizer(ctx, func(t engine.Tokenizer) (err error) {
		ids, err = t.Tokenize(ctx, request)
		return err
	})
	return ids, err
}

// Detokenize has generated ids turned into text, as Tokenize does the other way.
func (f *Fleet) Detokenize(ctx context.Context, ids []int32, ended bool) (text string, err error) {
	err = f.askTokenizer(ctx, func(t engine.Tokenizer) (err error) {
		text, err = t.Detokenize(ctx, ids, ended)
		return err
	})
	return text, err
}

func (f *Fleet) askTokenizer(ctx context.Context, ask func(engine.Tokenizer) error) error {
	members := f.all()
	slices.SortFunc(members, func(a, b *member) int { return cmp.Compare(a.id, b.id) })
	var last error
	for _, m := range members {
		if !m.isUp() {
			continue
		}
		err := error(&engine.Error{Class: engine.FailTurn, Message: fmt.Sprintf("an engine of kind %s cannot tokenise", m.described().Kind)})
		if tokenizer, ok := engine.TokenizerOf(m.client); ok {
			err = ask(tokenizer)
		}
		if err == nil || ctx.Err() != nil {
			return err
		}
		// What may pass counts for more than an engine that never can.
		if last == nil || !neverAnswers(err) {
			last = fmt.Errorf("%s: %w", m.id, err)
		}
		if refused(err) {
			m.markDown(ctx, err)
		}
	}
	if last != nil {
		return last
	}
	return &engine.Error{Class: engine.RetryElsewhere, Message: "no engine of the pool is up to tokenise", Err: engine.ErrNotCalled}
}

func neverAnswers(err error) bool {
	var e *engine.Error
	return errors.As(err, &e) && e.Class == engine.FailTurn
}
