// The AI SDK with its OpenAI provider.

import { createOpenAI } from '@ai-sdk/openai';
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';
import { catchError, PIXEL, readAll, runCases } from './harness.mjs';

const set = (options) => ({ providerOptions: { openai: options } });

const schema = z.object({ name: z.string(), age: z.number().int() });
const get_weather = tool({
  description: 'Get the weather of a city',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `mild in ${city}`,
});
const think = (options) => set({ forceReasoning: true, reasoningEffort: 'low', reasoningSummary: 'auto', ...options });

const pick = ({ text, finishReason, usage: { inputTokens, outputTokens } }) => ({
  text,
  finishReason,
  usage: [inputTokens, outputTokens],
});

/** Summarize a run of several steps. */
const summarize = async ({ text, steps }) => ({
  text: await text,
  steps: (await steps).map(({ content, finishReason }) => [finishReason, ...content.map(({ type }) => type)]),
  thoughts: (await steps).map(({ reasoningText }) => reasoningText ?? null),
});

await runCases(({ url, model }) => {
  const openai = createOpenAI({ baseURL: url, apiKey: 'any' });
  const common = { model: openai.responses(model), maxRetries: 0 };
  // The model reasons, calls a tool and reads its output.
  const thoughtful = { ...common, prompt: 'weather', tools: { get_weather }, stopWhen: stepCountIs(3) };

  /** Run with a tool of the provider, without and with streaming. */
  async function use(name, tools) {
    const settings = { ...common, prompt: `use ${name}`, tools, stopWhen: stepCountIs(4) };
    const whole = await generateText(settings);
    const streamed = streamText(settings);
    await streamed.consumeStream();
    return [await summarize(whole), await summarize(streamed)].map(({ text, steps }) => ({ text, steps }));
  }

  return {
    async generate() {
      const result = await generateText({ ...common, system: 'Be kind.', prompt: 'hello there', temperature: 0.5 });
      return { ...pick(result), warnings: result.warnings, id: result.providerMetadata.openai.responseId.slice(0, 5) };
    },

    async stream() {
      const result = streamText({ ...common, prompt: 'hello there' });
      const parts = await readAll(result.fullStream);
      const texts = parts.flatMap((part) => (part.type === 'text-delta' ? part.text : []));
      return {
        types: parts.map(({ type }) => type),
        joined: texts.join(''),
        ...pick({ text: await result.text, finishReason: await result.finishReason, usage: await result.usage }),
      };
    },

    // Stored items are sent back as references, others with encrypted reasoning.
    stored: async () => summarize(await generateText({ ...thoughtful, ...think({}) })),
    unstored: async () => summarize(await generateText({ ...thoughtful, ...think({ store: false }) })),

    async streamed() {
      const result = streamText({ ...thoughtful, ...think({ store: false }) });
      const parts = await readAll(result.fullStream);
      return { types: [...new Set(parts.map(({ type }) => type))], ...(await summarize(result)) };
    },

    async object() {
      const settings = { ...common, schema, prompt: 'profile' };
      const streamed = streamObject(settings);
      const partial = await readAll(streamed.partialObjectStream);
      const { output } = await generateText({ ...common, prompt: 'profile', output: Output.object({ schema }) });
      return [(await generateObject(settings)).object, await streamed.object, partial.at(-1), output];
    },

    async chain() {
      const first = await generateText({ ...common, prompt: 'my name is ada' });
      const { responseId } = first.providerMetadata.openai;
      const again = streamText({ ...common, prompt: 'recall', ...set({ previousResponseId: responseId }) });
      return [await again.text, (await again.providerMetadata).openai.responseId !== responseId];
    },

    async history() {
      const history = [{ role: 'user', content: 'my name is ada' }];
      const first = await generateText({ ...common, messages: history });
      const messages = [...history, ...first.response.messages, { role: 'user', content: 'recall' }];
      return (await generateText({ ...common, messages })).text;
    },

    async image() {
      const content = [
        { type: 'text', text: 'what is this' },
        { type: 'image', image: PIXEL, mediaType: 'image/png', providerOptions: { openai: { imageDetail: 'low' } } },
      ];
      return (await generateText({ ...common, messages: [{ role: 'user', content }] })).text;
    },

    async logprobs() {
      const result = await generateText({ ...common, prompt: 'surely', ...set({ logprobs: 2 }) });
      return result.providerMetadata.openai.logprobs;
    },

    async sources() {
      const result = await generateText({ ...common, prompt: 'cite' });
      return result.sources.map(({ sourceType, url: address, title }) => [sourceType, address, title]);
    },

    async errors() {
      const explain = ({ name, statusCode, isRetryable, data, message }) => [
        name,
        statusCode,
        isRetryable,
        data.error,
        message,
      ];
      return [
        explain(await catchError(() => generateText({ ...common, model: openai.responses('unknown'), prompt: 'x' }))),
        explain(await catchError(() => generateText({ ...common, prompt: 'too much' }))),
      ];
    },

    async breakdown() {
      const failed = await catchError(() => generateText({ ...common, prompt: 'fail' }));
      const parts = await readAll(streamText({ ...common, prompt: 'fail', onError() {} }).fullStream);
      const short = await generateText({ ...common, prompt: 'short' });
      return {
        failed: failed.name,
        errors: parts.flatMap((part) => (part.type === 'error' ? part.error.error?.message ?? part.error.message : [])),
        last: parts.at(-1).finishReason,
        short: [short.finishReason, short.text],
      };
    },

    async keepalive() {
      const result = streamText({ ...common, prompt: 'slowly', includeRawChunks: true });
      const parts = await readAll(result.fullStream);
      const has_keepalive = parts.some((part) => part.type === 'raw' && part.rawValue.type === 'keepalive');
      return { has_keepalive, text: await result.text };
    },

    draw: () =>
      use('draw', { draw: openai.tools.customTool({ name: 'draw', execute: async (input) => `drew ${input}` }) }),

    shell: () =>
      use('shell', {
        shell: openai.tools.shell({
          execute: async ({ action }) => ({
            output: action.commands.map((command) => ({
              stdout: `ran ${command}`,
              stderr: '',
              outcome: { type: 'exit', exitCode: 0 },
            })),
          }),
        }),
      }),

    apply_patch: () =>
      use('apply_patch', {
        apply_patch: openai.tools.applyPatch({
          execute: async ({ operation }) => ({ status: 'completed', output: `created ${operation.path}` }),
        }),
      }),

    search: () =>
      use('search', {
        toolSearch: openai.tools.toolSearch(),
        get_weather: { ...get_weather, providerOptions: { openai: { deferLoading: true } } },
      }),

    namespace: () =>
      use('namespace', {
        get_weather: {
          ...get_weather,
          providerOptions: { openai: { namespace: { name: 'sky', description: 'What is above.' } } },
        },
      }),

    async embedded() {
      const settings = { ...common, temperature: 0, maxOutputTokens: 40 };
      const streamed = streamText({ ...settings, prompt: 'What is the capital of France?' });
      const parts = await readAll(streamed.textStream);
      const called = await generateText({
        ...settings,
        prompt: 'What is the weather in Paris?',
        tools: { get_weather },
        toolChoice: { type: 'tool', toolName: 'get_weather' },
      });
      const { object } = await generateObject({ ...settings, schema, prompt: 'Ada is 36 years old.' });
      return {
        text: await streamed.text,
        joined: parts.join(''),
        calls: called.toolCalls.map(({ toolName, input }) => [toolName, Object.keys(input)]),
        results: called.toolResults.length,
        object: Object.keys(object),
      };
    },
  };
});
